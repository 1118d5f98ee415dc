// What the compiler makes of 16-byte vectors: SSE2 on x86-64, NEON on Arm.
#define ISA portable
#define LANES 4
#define REGISTERS 16
#define ROWS 4
#include "mass_kernel.h"

namespace vllm_evict {
const Kernel* const portable_kernel = &portable::kernel;
}

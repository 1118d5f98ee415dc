// 16-byte vectors, which the compiler maps to SSE2 on x86-64 and NEON on Arm.
#define ISA portable
#define LANES 4
#define REGISTERS 16
#define ROWS 4
#include "mass_kernel.h"

namespace vllm_evict {
const Kernel* const portable_kernel = &portable::kernel;
}

#define ISA portable
#define LANES 4
#include "reach_kernel.h"

namespace vllm_evict {
const ReachKernel* const portable_reach = &portable::reach_kernel;
}

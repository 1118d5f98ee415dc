#define ISA portable_reach
#define LANES 4
#include "reach_kernel.h"

namespace vllm_evict {
const BlockLogits portable_logits = portable_reach::block_logits;
}

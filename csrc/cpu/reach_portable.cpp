#define ISA portable
#define LANES 4
#include "reach_kernel.h"

namespace vllm_evict {
const BlockLogits portable_logits = portable::block_logits;
}

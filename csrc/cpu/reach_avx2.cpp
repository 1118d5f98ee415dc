#include "reach.h"
#define AVX2
#include "isa.h"
#ifdef ISA
#include "reach_kernel.h"
#endif

namespace vllm_evict {
const BlockLogits avx2_logits = OF_ISA(block_logits);
}

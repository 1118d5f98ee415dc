#include "reach.h"
#define AVX512
#include "isa.h"
#ifdef ISA
#include "reach_kernel.h"
#endif

namespace vllm_evict {
const BlockLogits avx512_logits = OF_ISA(block_logits);
}

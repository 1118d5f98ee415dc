#include "reach.h"
#define AVX2
#include "isa.h"
#ifdef ISA
#include "reach_kernel.h"
#endif

namespace vllm_evict {
const ReachKernel* const avx2_reach = OF_ISA(reach_kernel);
}

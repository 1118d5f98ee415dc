#include "reach.h"
#define AVX512_VNNI
#include "isa.h"
#ifdef ISA
#include "reach_kernel.h"
#endif

namespace vllm_evict {
const ReachKernel* const avx512_vnni_reach = OF_ISA(reach_kernel);
}

#include "mass.h"
#define AVX512
#include "isa.h"
#ifdef ISA
#include "mass_kernel.h"
#endif

namespace vllm_evict {
const Kernel* const avx512_kernel = OF_ISA(kernel);
}

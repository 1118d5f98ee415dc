#include "mass.h"
#define AVX2
#include "isa.h"
#ifdef ISA
#include "mass_kernel.h"
#endif

namespace vllm_evict {
const Kernel* const avx2_kernel = OF_ISA(kernel);
}

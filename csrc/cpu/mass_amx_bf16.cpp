#include "mass.h"
#define AMX_BF16
#include "isa.h"
#ifdef ISA
#include "mass_kernel.h"
#endif

namespace vllm_evict {
const Kernel* const amx_bf16_kernel = OF_ISA(kernel);
}

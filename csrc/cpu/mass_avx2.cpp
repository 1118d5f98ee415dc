#include "mass.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

#pragma GCC target("avx2,fma,f16c")
#define ISA avx2
#define LANES 8
#define REGISTERS 16
#define ROWS 4
#define WIDEN_U8(from) _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)(from)))
#define WIDEN_U16(x) _mm256_cvtepu16_epi32((__m128i)(x))
#define WIDEN_F16(x) _mm256_cvtph_ps((__m128i)(x))
#include "mass_kernel.h"

namespace vllm_evict {
const Kernel* const avx2_kernel = &avx2::kernel;
}

#else

namespace vllm_evict {
const Kernel* const avx2_kernel = nullptr;
}

#endif

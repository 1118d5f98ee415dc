#include "mass.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11

#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16,amx-tile,amx-bf16")
#define ISA amx_bf16
#define LANES 16
#define REGISTERS 32
#define ROWS 8
#define WIDEN_U8(from) _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(from)))
// Masked, since GCC 12 warns of an uninitialised variable in the plain intrinsics.
#define WIDEN_U16(x) _mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)(x))
#define WIDEN_F16(x) _mm512_maskz_cvtph_ps(0xffff, (__m256i)(x))
#define DOT_BF16(sum, a, b) (Vec) _mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b))
#define AMX
#include "mass_kernel.h"

namespace vllm_evict {
const Kernel* const amx_bf16_kernel = &amx_bf16::kernel;
}

#else

namespace vllm_evict {
const Kernel* const amx_bf16_kernel = nullptr;
}

#endif

// An instruction set of x86-64. A source file names it by AVX2, AVX512, AVX512_VNNI, AVX512_BF16 or AMX_BF16
// before it includes this header, and includes other headers before that: their inline functions
// are for every machine. What follows is compiled for the instruction set, with the names defined
// that mass_kernel.h wants. If the compiler does not have it, ISA is not defined.

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !(defined(AMX_BF16) && __GNUC__ < 11)

#include <immintrin.h>

#ifdef AVX2
#pragma GCC target("avx2,fma,f16c")
#define ISA avx2
#define LANES 8
#define REGISTERS 16
#define ROWS 4
#define WIDEN_U8(from) _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)(from)))
#define WIDEN_U16(x) _mm256_cvtepu16_epi32((__m128i)(x))
#define WIDEN_F16(x) _mm256_cvtph_ps((__m128i)(x))
#define WIDEN_BYTES(from) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from)))
#define WIDEN_CHARS(from) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from)))
#define SPREAD(from) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(from)))
#define LOOK_UP(table, places) _mm256_shuffle_epi8((__m256i)(table), (__m256i)(places))
#define PICK(from, places) \
  _mm256_blendv_ps(_mm256_permutevar8x32_ps(_mm256_loadu_ps(from), (__m256i)(places)), \
                   _mm256_permutevar8x32_ps(_mm256_loadu_ps((from) + 8), (__m256i)(places)), (__m256)((places) << 28))
#define MULTIPLY_ROUND(a, b) _mm256_mulhrs_epi16((__m256i)(a), (__m256i)(b))
#define DOT_BYTES(sum, a, b) \
  (sum) + (IntVec)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)(a), (__m256i)(b)), _mm256_set1_epi16(1))
#else
#define LANES 16
#define REGISTERS 32
#define ROWS 8
#define WIDEN_U8(from) _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(from)))
// Masked, since GCC 12 warns of an uninitialised variable in the plain intrinsics.
#define WIDEN_U16(x) _mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)(x))
#define WIDEN_F16(x) _mm512_maskz_cvtph_ps(0xffff, (__m256i)(x))
#define WIDEN_BYTES(from) _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)(from)))
#define WIDEN_CHARS(from) _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)(from)))
#define NARROW(words) _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)(words))
#define SPREAD(from) _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128((const __m128i*)(from)))
#define LOOK_UP(table, places) _mm512_shuffle_epi8((__m512i)(table), (__m512i)(places))
#define PICK(from, places) _mm512_maskz_permutexvar_ps(0xffff, (__m512i)(places), _mm512_loadu_ps(from))
#define MULTIPLY_ROUND(a, b) _mm512_mulhrs_epi16((__m512i)(a), (__m512i)(b))
#ifdef AVX512_VNNI
#define DOT_BYTES(sum, a, b) (IntVec) _mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(a), (__m512i)(b))
#else
#define DOT_BYTES(sum, a, b) \
  (sum) + (IntVec)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)(a), (__m512i)(b)), _mm512_set1_epi16(1))
#endif
#endif

#ifdef AVX512
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define ISA avx512
#endif

#ifdef AVX512_VNNI
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512vnni")
#define ISA avx512_vnni
#endif

#ifdef AVX512_BF16
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16")
#define ISA avx512_bf16
#endif

#ifdef AMX_BF16
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16,amx-tile,amx-bf16")
#define ISA amx_bf16
#define AMX
#endif

#if defined(AVX512_BF16) || defined(AMX_BF16)
#define DOT_BF16(sum, a, b) (Vec) _mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b))
#endif

// What a source file has for the instruction set, or null.
#define OF_ISA(name) &ISA::name
#else
#define OF_ISA(name) nullptr
#endif

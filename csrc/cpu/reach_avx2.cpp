#include "reach.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

#pragma GCC target("avx2,fma,f16c")
#define ISA avx2_reach
#define LANES 8
#define WIDEN_U16(x) _mm256_cvtepu16_epi32((__m128i)(x))
#define WIDEN_F16(x) _mm256_cvtph_ps((__m128i)(x))
#include "reach_kernel.h"

namespace vllm_evict {
const BlockLogits avx2_logits = avx2_reach::block_logits;
}

#else

namespace vllm_evict {
const BlockLogits avx2_logits = nullptr;
}

#endif

#include "reach.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define ISA avx512_reach
#define LANES 16
#define WIDEN_U16(x) _mm512_cvtepu16_epi32((__m256i)(x))
#define WIDEN_F16(x) _mm512_cvtph_ps((__m256i)(x))
#include "reach_kernel.h"

namespace vllm_evict {
const BlockLogits avx512_logits = avx512_reach::block_logits;
}

#else

namespace vllm_evict {
const BlockLogits avx512_logits = nullptr;
}

#endif

#include "compact.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,avx2")

namespace vllm_evict {
namespace {

// Instructions for one word size: a masked load, a compression, and a masked store.
template <int kBytes>
inline void squeeze(const char* from, uint64_t taken, char* to, uint64_t written);

template <>
inline void squeeze<1>(const char* from, uint64_t taken, char* to, uint64_t written) {
  const __m512i words = _mm512_maskz_loadu_epi8(taken, from);
  _mm512_mask_storeu_epi8(to, written, _mm512_maskz_compress_epi8(taken, words));
}
template <>
inline void squeeze<2>(const char* from, uint64_t taken, char* to, uint64_t written) {
  const __m512i words = _mm512_maskz_loadu_epi16((__mmask32)taken, from);
  _mm512_mask_storeu_epi16(to, (__mmask32)written,
                           _mm512_maskz_compress_epi16((__mmask32)taken, words));
}
template <>
inline void squeeze<4>(const char* from, uint64_t taken, char* to, uint64_t written) {
  const __m512i words = _mm512_maskz_loadu_epi32((__mmask16)taken, from);
  _mm512_mask_storeu_epi32(to, (__mmask16)written,
                           _mm512_maskz_compress_epi32((__mmask16)taken, words));
}

// A vector of columns at a time, in ascending order. Within one block a store ends before the columns of
// the next vector.
template <int kBytes>
void move_rows(const KeyRun& run) {
  constexpr int64_t kLanes = 64 / kBytes;
  const int64_t row_bytes = run.columns * kBytes;
  char* to = run.to;
  int64_t done = 0;
  for (int64_t first = 0; done < run.count; first += kLanes) {
    uint64_t taken = 0;
    int64_t count = 0;
    for (; done + count < run.count && run.column[done + count] < first + kLanes; ++count)
      taken |= uint64_t(1) << (run.column[done + count] - first);
    const uint64_t written = count < 64 ? (uint64_t(1) << count) - 1 : ~uint64_t(0);
    const char* from = run.from + first * kBytes;
    if (count)
      for (int64_t row = 0; row < run.rows; ++row) {
        squeeze<kBytes>(from + row * row_bytes, taken, to + row * row_bytes, written);
        __builtin_prefetch(from + row * row_bytes + run.next, 0, 2);
      }
    to += count * kBytes;
    done += count;
  }
}

constexpr MoveRows kMoves[] = {move_rows<1>, move_rows<2>, move_rows<4>};

}  // namespace

const MoveRows* const avx512_moves = kMoves;

}  // namespace vllm_evict

#else

namespace vllm_evict {
const MoveRows* const avx512_moves = nullptr;
}

#endif

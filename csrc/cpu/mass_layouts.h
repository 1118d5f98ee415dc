// How keys and values lie in a block of the CPU cache, and how they become vectors.
#pragma once

#include "vectors.h"

namespace vllm_evict::ISA {
namespace {

// LANES pairs of elements: the first of each, then the second.
inline void widen_pairs(const Bf16* from, Vec (&to)[2]) {
  const WordVec pairs = load<WordVec>(from);
  to[0] = (Vec)(pairs << 16);
  to[1] = (Vec)(pairs & 0xffff0000);
}

template <class Fp8>
inline void widen_pairs(const Fp8* from, Vec (&to)[2]) {
  const HalfVec pairs = load<HalfVec>(from);
  to[0] = widen_f16(to_f16(pairs << 8, from));
  to[1] = widen_f16(to_f16(pairs & 0xff00, from));
}

// The unit of multiplication: two dims of LANES tokens by two dims of one query, in kSteps
// instructions.

struct Dims {
  typedef float Query;
  static constexpr int kSteps = 2;
  Vec dim[2];
  Vec multiply_add(int step, float q, Vec sum) const { return dim[step] * q + sum; }
};

#ifdef DOT_BF16
struct Pairs {
  typedef uint32_t Query;
  static constexpr int kSteps = 1;
  WordVec pairs;
  Vec multiply_add(int, uint32_t q, Vec sum) const { return DOT_BF16(sum, pairs, q + WordVec{}); }
};
#endif

// Layout of keys in a block. offset() is the offset of a token's first element. read() loads
// two dims of LANES tokens; the next two dims are a step() away. kBytes are the bytes of
// LANES tokens in a cache line.
// Layout of its values: kTokens tokens are interleaved. value_offset() is the offset of a token's
// dim. value_offset(0, d, ...) is also the distance from an aligned dim to the dim d behind it.
// read_values() loads LANES dims of kTokens tokens; the next tokens are a value_step() away.

// Tokens of one dim are adjacent; values are [block_size, dim].
template <class T>
struct DimRows {
  typedef T Element;
  static constexpr int kBytes = LANES * sizeof(T);
  static int64_t offset(int64_t token, int64_t) { return token; }
  static int64_t step(int64_t block_size) { return 2 * block_size; }
  static void read(const T* from, int64_t block_size, Dims& to) {
    to.dim[0] = widen(from);
    to.dim[1] = widen(from + block_size);
  }
#ifdef DOT_BF16
  static void read(const T* from, int64_t block_size, Pairs& to) {
    to.pairs = widen_words(load<HalfVec>(from)) | widen_words(load<HalfVec>(from + block_size)) << 16;
  }
#endif
  static void prefetch(const T* from, int64_t block_size) {
    __builtin_prefetch(from);
    __builtin_prefetch(from + block_size);
  }
  static constexpr int kTokens = 1;
  static int64_t value_offset(int64_t token, int64_t at, int64_t, int64_t dim) {
    return token * dim + at;
  }
  static int64_t value_step(int64_t dim) { return dim; }
  static void read_values(const T* from, Vec (&value)[1]) { value[0] = widen(from); }
};

// Pairs of dims of 16 tokens are adjacent. Of values, pairs of tokens of 16 dims are.
template <class T>
struct PairRows {
  typedef T Element;
  static constexpr int kBytes = LANES * 2 * sizeof(T);
  static int64_t offset(int64_t token, int64_t dim) {
    return token / 16 * 16 * dim + token % 16 * 2;
  }
  static int64_t step(int64_t) { return 32; }
  static void read(const T* from, int64_t, Dims& to) { widen_pairs(from, to.dim); }
#ifdef DOT_BF16
  static void read(const T* from, int64_t, Pairs& to) { to.pairs = load<WordVec>(from); }
#endif
  static void prefetch(const T* from, int64_t) { __builtin_prefetch(from); }
  static constexpr int kTokens = 2;
  static int64_t value_offset(int64_t token, int64_t at, int64_t block_size, int64_t) {
    return at / 16 * 16 * block_size + token / 2 * 32 + at % 16 * 2;
  }
  static int64_t value_step(int64_t) { return 32; }
  static void read_values(const T* from, Vec (&value)[2]) { widen_pairs(from, value); }
};

}  // namespace
}  // namespace vllm_evict::ISA

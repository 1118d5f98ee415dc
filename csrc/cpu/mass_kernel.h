#define PFH 3
// The one kernel, included by a source file per instruction set, which defines
//   ISA    the namespace and name of this copy,
//   LANES  floats in a vector register,
//   ROWS   query rows kept in registers together.
// Only GCC vector extensions and always-inline intrinsics here: a function from
// a standard header could be merged by the linker with another copy's.

#include "mass.h"

namespace vllm_evict::ISA {
namespace {

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef uint32_t WordVec __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * LANES)));

constexpr float kNone = -1e30f;  // peak of a tile that a row does not see

template <class V>
inline V load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

inline void store(float* to, Vec v) { __builtin_memcpy(to, &v, sizeof(Vec)); }

inline Vec splat(float x) { return x - Vec{}; }

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

// 2^x for x <= 0, at most 1.3 ulp off; 0 below 2^-126.
inline Vec exp2(Vec x) {
  const Vec round = splat(12582912.f);  // 1.5 * 2^23
  Vec whole = x + round;
  Vec part = x - (whole - round);
  Vec p = part * 0.0013264728f + 0.0096715139f;
  p = p * part + 0.0555073358f;
  p = p * part + 0.2402224243f;
  p = p * part + 0.6931470037f;
  p = p * part + 1.f;
  p = (Vec)((WordVec)p + ((WordVec)whole << 23));
  return x > -126.f ? p : Vec{};
}

inline WordVec widen_words(const uint16_t* from) {
#ifdef WIDEN_U16
  return (WordVec)WIDEN_U16(load<HalfVec>(from));
#else
  return __builtin_convertvector(load<HalfVec>(from), WordVec);
#endif
}

// Element types of packed keys. load() reads LANES tokens of dims d and d + 1.

struct F32 {
  typedef float Element;
  static constexpr int64_t offset(int64_t token, int64_t) { return token; }
  static constexpr int64_t step(int64_t block_size) { return 2 * block_size; }
  static void load2(const Element* from, int64_t block_size, Vec& even, Vec& odd) {
    even = load<Vec>(from);
    odd = load<Vec>(from + block_size);
  }
};

struct BF16 {
  typedef uint16_t Element;
  static constexpr int64_t offset(int64_t token, int64_t) { return token; }
  static constexpr int64_t step(int64_t block_size) { return 2 * block_size; }
  static Vec widen(const Element* from) {
    return (Vec)(widen_words(from) << 16);
  }
  static void load2(const Element* from, int64_t block_size, Vec& even, Vec& odd) {
    even = widen(from);
    odd = widen(from + block_size);
  }
};

struct F16 {
  typedef uint16_t Element;
  static constexpr int64_t offset(int64_t token, int64_t) { return token; }
  static constexpr int64_t step(int64_t block_size) { return 2 * block_size; }
  static Vec widen(const Element* from) {
#ifdef WIDEN_F16
    return (Vec)WIDEN_F16(load<HalfVec>(from));
#else
    WordVec bits = widen_words(from);
    WordVec sign = (bits & 0x8000) << 16;
    // The exponents differ by 112; the product is exact for subnormals too.
    Vec finite = (Vec)((bits & 0x7fff) << 13) * 0x1p112f;
    WordVec special = (bits & 0x7c00) == 0x7c00 ? WordVec{} + 0x7f800000 : WordVec{};
    return (Vec)((WordVec)finite | special | sign);
#endif
  }
  static void load2(const Element* from, int64_t block_size, Vec& even, Vec& odd) {
    even = widen(from);
    odd = widen(from + block_size);
  }
};

// Words of two dims; a row of 16 tokens' words for each pair of dims.
struct AMX {
  typedef uint16_t Element;
  static constexpr int64_t offset(int64_t token, int64_t dim) {
    return token / 16 * 16 * dim + token % 16 * 2;
  }
  static constexpr int64_t step(int64_t) { return 32; }
  static void load2(const Element* from, int64_t, Vec& even, Vec& odd) {
    WordVec words = load<WordVec>(from);
    even = (Vec)(words << 16);
    odd = (Vec)(words & 0xffff0000);
  }
};

template <int... I>
struct Indices {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
  typedef Indices<I...> Type;
};
typedef Count<LANES>::Type Lanes;

template <int... I>
inline IntVec lane_numbers(Indices<I...>) {
  return IntVec{I...};
}

// The halves of `a` and `b` whose lane numbers lack / have bit S, interleaved:
// combining them gives a's results where bit S is 0 and b's where it is 1.
template <int S, int... I>
inline Vec lower(Vec a, Vec b, Indices<I...>) {
  return __builtin_shufflevector(a, b, (I & S ? LANES + (I ^ S) : I)...);
}
template <int S, int... I>
inline Vec upper(Vec a, Vec b, Indices<I...>) {
  return __builtin_shufflevector(a, b, (I & S ? LANES + I : I ^ S)...);
}

struct Max {
  static Vec of(Vec a, Vec b) { return max(a, b); }
};
struct Sum {
  static Vec of(Vec a, Vec b) { return a + b; }
};

// Lane m of the result combines all lanes of v[m].
template <class Combine, int M, int S = 1>
inline Vec across(const Vec* v) {
  if constexpr (S == LANES) {
    return v[0];
  } else {
    constexpr int kHalf = (M + 1) / 2;
    Vec next[kHalf];
#pragma GCC unroll 8
    for (int i = 0; i < kHalf; ++i) {
      Vec a = v[2 * i], b = v[2 * i + 1 < M ? 2 * i + 1 : 2 * i];
      next[i] = Combine::of(lower<S>(a, b, Lanes{}), upper<S>(a, b, Lanes{}));
    }
    return across<Combine, kHalf, 2 * S>(next);
  }
}

constexpr int padded_rows(int count) { return count == 5 ? 6 : count == 7 ? 8 : count; }

// Scores of M rows (count of them real) against N vectors of tokens, in
// registers, and their statistics. `keys` is the block, `token` the first
// token's place in the block, `visible` that in the request.
template <class Keys, int N, int M>
inline void score_tile(const Rows& rows, int64_t first, const Blocks& blocks,
                       const typename Keys::Element* keys, int64_t ahead, int64_t token,
                       int64_t position,
                       const Tiles& tiles, int64_t tile) {
  // Two chains of additions where one would wait for its own latency.
  constexpr int kChains = M * N < 8 ? 2 : 1;
  Vec score[kChains][M][N] = {};
  const typename Keys::Element* from[N];
  for (int n = 0; n < N; ++n) from[n] = keys + Keys::offset(token + n * LANES, blocks.dim);
  const float* q = rows.q + first * blocks.dim;
  for (int64_t d = 0; d < blocks.dim; d += 2, q += 2 * M) {
    Vec even[N], odd[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      Keys::load2(from[n], blocks.size, even[n], odd[n]);
      if (sizeof(Vec) * n % (sizeof(float) / sizeof(typename Keys::Element) * sizeof(Vec)) == 0) {
        __builtin_prefetch(from[n] + ahead, 0, PFH);
        __builtin_prefetch(from[n] + ahead + blocks.size, 0, PFH);
      }
      from[n] += Keys::step(blocks.size);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) score[0][m][n] += even[n] * q[m];
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) score[kChains - 1][m][n] += odd[n] * q[M + m];
    }
  }
  const int64_t count = rows.count - first < M ? rows.count - first : M;
  const int32_t* seen = rows.seen + first;
  const bool all_seen = seen[0] >= position + N * LANES;
  Vec top[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      Vec& s = score[0][m][n];
      if (kChains == 2) s += score[1][m][n];
      if (!all_seen) {
        const int32_t left = seen[m < count ? m : count - 1] - (int32_t)(position + n * LANES);
        s = lane_numbers(Lanes{}) < left ? s : splat(-__builtin_inff());
      }
      top[m] = n ? max(top[m], s) : max(s, splat(kNone));
    }
  }
  float peak[LANES], mass[LANES];
  store(peak, across<Max, M>(top));
  Vec sum[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    sum[m] = exp2(score[0][m][0] - peak[m]);
#pragma GCC unroll 4
    for (int n = 1; n < N; ++n) sum[m] += exp2(score[0][m][n] - peak[m]);
  }
  store(mass, across<Sum, M>(sum));
  for (int64_t m = 0; m < count; ++m) {
    tiles.peak[(first + m) * tiles.stride + tile] = peak[m];
    tiles.mass[(first + m) * tiles.stride + tile] = mass[m];
  }
}

template <class Keys, int N>
void score_keys(const Rows& rows, const Blocks& blocks, int64_t begin, int64_t end,
                const Tiles& tiles) {
  typedef typename Keys::Element Element;
  constexpr int64_t kTokens = N * LANES;
  for (int64_t block = begin; block < end; ++block) {
    const Element* keys = (const Element*)blocks.keys + blocks.table[block] * blocks.stride;
    const int64_t next = block + 1 < end ? blocks.table[block + 1] : blocks.table[block];
    const int64_t ahead = (next - blocks.table[block]) * blocks.stride;
    for (int64_t token = 0; token < blocks.size; token += kTokens) {
      const int64_t position = block * blocks.size + token;
      const int64_t tile = position / kTokens;
      for (int64_t first = 0; first < rows.count; first += ROWS) {
        const int64_t left = rows.count - first;
        const int count = left < ROWS ? (int)left : ROWS;
        if (rows.seen[first + count - 1] <= position) continue;
        switch (padded_rows(count)) {
#define CASE(M)                                                                                 \
  case M:                                                                                       \
    score_tile<Keys, N, M>(rows, first, blocks, keys, ahead, token, position, tiles, tile);            \
    break;
          CASE(1)
          CASE(2)
          CASE(3)
          CASE(4)
#if ROWS == 8
          CASE(6)
          CASE(8)
#endif
#undef CASE
        }
      }
    }
  }
}

int64_t tile_tokens(int64_t block_size) {
  return block_size % (2 * LANES) ? LANES : 2 * LANES;
}

int64_t padded(int64_t count) { return padded_rows((int)count); }

template <class Keys>
void score_packed(const Rows& rows, const Blocks& blocks, int64_t begin, int64_t end,
                  const Tiles& tiles) {
#if LANES == 16  // block sizes are multiples of 16
  if (blocks.size % (2 * LANES)) return score_keys<Keys, 1>(rows, blocks, begin, end, tiles);
#endif
  score_keys<Keys, 2>(rows, blocks, begin, end, tiles);
}

void score(const Rows& rows, const Blocks& blocks, int64_t begin, int64_t end,
           const Tiles& tiles) {
  switch (blocks.packing) {
    case Packing::f32:
      return score_packed<F32>(rows, blocks, begin, end, tiles);
    case Packing::bf16:
      return score_packed<BF16>(rows, blocks, begin, end, tiles);
    case Packing::f16:
      return score_packed<F16>(rows, blocks, begin, end, tiles);
    case Packing::amx:
      return score_packed<AMX>(rows, blocks, begin, end, tiles);
  }
}

// Turns one row's statistics into weighted probabilities, in `mass`.
inline void normalise(float* peak, float* mass, int64_t tiles, int64_t padded, float weight) {
  for (int64_t t = tiles; t < padded; ++t) peak[t] = kNone, mass[t] = 0;
  Vec top = load<Vec>(peak);
  for (int64_t t = LANES; t < padded; t += LANES) top = max(top, load<Vec>(peak + t));
  const float row_peak = across<Max, 1>(&top)[0];
  Vec sum = {};
  for (int64_t t = 0; t < padded; t += LANES) {
    Vec part = load<Vec>(mass + t) * exp2(load<Vec>(peak + t) - row_peak);
    store(mass + t, part);
    sum += part;
  }
  const float factor = weight / across<Sum, 1>(&sum)[0];
  for (int64_t t = 0; t < padded; t += LANES) store(mass + t, load<Vec>(mass + t) * factor);
}

void fold(const Rows& rows, int64_t block_size, const Tiles& tiles, float* out) {
  const int64_t tokens = tile_tokens(block_size);
  const int64_t per_block = block_size / tokens;
  // The last row sees the most, so its tiles can take the others'.
  const int64_t last = rows.count - 1;
  float* total = tiles.mass + last * tiles.stride;
  const int64_t num_tiles = (rows.seen[last] + tokens - 1) / tokens;
  for (int64_t row = last; row >= 0; --row) {
    float* mass = tiles.mass + row * tiles.stride;
    const int64_t seen = (rows.seen[row] + tokens - 1) / tokens;
    const int64_t padded = (seen + LANES - 1) / LANES * LANES;
    normalise(tiles.peak + row * tiles.stride, mass, seen, padded, rows.weights[row]);
    if (row == last) continue;
    for (int64_t t = 0; t < padded; t += LANES)
      store(total + t, load<Vec>(total + t) + load<Vec>(mass + t));
  }
  for (int64_t t = 0; t < num_tiles; ++t) out[t / per_block] += total[t];
}

const Kernel kernel = {ISA_NAME, ROWS, tile_tokens, padded, score, fold};

}  // namespace
}  // namespace vllm_evict::ISA

// One tile of keys and a few rows of queries, in registers: scores, their statistics, and the step of online
// softmax that adds values.
#pragma once

#include "mass.h"
#include "mass_layouts.h"

namespace vllm_evict::ISA {
namespace {

// ---- Lanes across vectors

#ifdef __clang__
#define VLLM_EVICT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define VLLM_EVICT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

// Lanes whose number has bit S = 0 get a's lanes without and with that bit, to be combined
// into one. The other lanes get b's.
template <int S, int... I>
inline Vec lower(Vec a, Vec b, Indices<I...>) {
  return VLLM_EVICT_SHUFFLE(a, b, (I & S ? LANES + (I ^ S) : I)...);
}
template <int S, int... I>
inline Vec upper(Vec a, Vec b, Indices<I...>) {
  return VLLM_EVICT_SHUFFLE(a, b, (I & S ? LANES + I : I ^ S)...);
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
      const Vec a = v[2 * i], b = v[2 * i + 1 < M ? 2 * i + 1 : 2 * i];
      next[i] = Combine::of(lower<S>(a, b, Lanes{}), upper<S>(a, b, Lanes{}));
    }
    return across<Combine, kHalf, 2 * S>(next);
  }
}

// ---- Scores

// Groups of 5 and 7 rows have no instances of their own, which would hardly be faster.
constexpr int padded_rows(int count) { return count == 5 ? 6 : count == 7 ? 8 : count; }
#if ROWS == 8
#define VLLM_EVICT_EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(6) CASE(8)
#else
#define VLLM_EVICT_EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4)
#endif

int64_t padded(int64_t count) { return padded_rows((int)count); }

// Two vectors if the block size, a multiple of 16, has room.
int64_t tile_tokens(int64_t block_size) { return block_size % (2 * LANES) ? LANES : 2 * LANES; }

// A tile of keys.
template <class Element>
struct Tile {
  const Element* block;
  int64_t next_block;  // elements from `block` to the next block
  int64_t token;       // first token, counted from the begin of the block
  int64_t position;    // first token, counted from the begin of the request
  int64_t index;       // index of the tile in the request
};

// Adds two dims to the scores of M rows against N vectors of tokens.
template <class Keys, class Operand, int N, int M>
inline void add_dims(const typename Keys::Element* (&from)[N], int64_t block_size,
                     int64_t next_block, const typename Operand::Query* q, Vec (&even)[M][N],
                     Vec (&odd)[M][N]) {
  Operand keys[N];
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n) {
    Keys::read(from[n], block_size, keys[n]);
    // Hardware prefetchers cannot follow the block table.
    if (n * Keys::kBytes % 64 == 0) Keys::prefetch(from[n] + next_block, block_size);
    from[n] += Keys::step(block_size);
  }
#pragma GCC unroll 2
  for (int step = 0; step < Operand::kSteps; ++step) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        Vec& sum = step ? odd[m][n] : even[m][n];
        sum = keys[n].multiply_add(step, q[step * M + m], sum);
      }
    }
  }
}

// Scales, caps and hides products of M rows and N vectors of tokens.
template <int N, int M>
inline __attribute__((always_inline)) void finish_scores(const Rows& rows, int64_t first,
                                                         int64_t position, Vec (&score)[M][N]) {
  const int64_t last = rows.count - 1;
  const bool all_seen = rows.seen[first] >= position + N * LANES;
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      Vec s = score[m][n] * rows.scale;
      if (rows.soft_cap != 0.f) s = soft_capped(s, rows.soft_cap);
      if (!all_seen) {
        const int64_t row = first + m < last ? first + m : last;
        const int64_t seen = rows.seen[row] - (position + n * LANES);
        s = lane_numbers(Lanes{}) < (int32_t)seen ? s : splat(-__builtin_inff());
      }
      score[m][n] = s;
    }
  }
}

// Scores of M rows against N vectors of tokens, in registers.
template <class Keys, class Operand, int N, int M>
inline __attribute__((always_inline)) void score_rows(const Rows& rows, int64_t first,
                                                      const Blocks& blocks,
                                                      const Tile<typename Keys::Element>& tile,
                                                      Vec (&score)[M][N]) {
  // Two chains of additions, if there are registers for them, hide the latency of an addition.
  constexpr int kChains = 2 * M * N <= REGISTERS - 8 ? 2 : 1;
  Vec sums[kChains][M][N] = {};
  const typename Keys::Element* from[N];
  for (int n = 0; n < N; ++n)
    from[n] = tile.block + Keys::offset(tile.token + n * LANES, blocks.dim);
  constexpr int kQuery = Operand::kSteps * M;
  const typename Operand::Query* q =
      (const typename Operand::Query*)rows.q + first * blocks.dim / 2 * Operand::kSteps;
  int64_t pairs = blocks.dim / 2;
  Vec(&even)[M][N] = sums[0];
  Vec(&odd)[M][N] = sums[kChains - 1];
  if constexpr (Operand::kSteps == 2) {
    for (; pairs; --pairs, q += kQuery)
      add_dims<Keys, Operand>(from, blocks.size, tile.next_block, q, even, odd);
  } else {
    for (; pairs > 1; pairs -= 2, q += 2 * kQuery) {
      add_dims<Keys, Operand>(from, blocks.size, tile.next_block, q, even, even);
      add_dims<Keys, Operand>(from, blocks.size, tile.next_block, q + kQuery, odd, odd);
    }
    if (pairs) add_dims<Keys, Operand>(from, blocks.size, tile.next_block, q, even, even);
  }

#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n)
      score[m][n] = kChains == 2 ? sums[0][m][n] + sums[1][m][n] : sums[0][m][n];
  finish_scores<N, M>(rows, first, tile.position, score);
}

// Lane m: the greatest score of row m, kUnseen if it sees none.
template <int N, int M>
inline __attribute__((always_inline)) Vec peaks(const Vec (&score)[M][N]) {
  Vec top[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    top[m] = splat(kUnseen);
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) top[m] = max(score[m][n], top[m]);
  }
  return across<Max, M>(top);
}

// Address of a tile's powers from a row on; null if powers are not stored.
template <int N>
inline float* powers_of(const Tiles& tiles, int64_t tile, int64_t first) {
  return tiles.powers ? tiles.powers + (tile * tiles.power_rows + first) * N * LANES : nullptr;
}

// Statistics of M rows' scores of a tile, in registers. Only powers go to memory.
template <int N, int M, bool kPowers>
inline __attribute__((always_inline)) void keep_statistics(const Vec (&score)[M][N],
                                                           int64_t first, int64_t index,
                                                           const Tiles& tiles) {
  const Vec peak = peaks<N, M>(score);
  [[maybe_unused]] float* powers = powers_of<N>(tiles, index, first);
  Vec sum[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      const Vec part = exp2(score[m][n] - peak[m]);
      if constexpr (kPowers) store(powers + (m * N + n) * LANES, part);
      sum[m] = n ? sum[m] + part : part;
    }
  }
  const Vec mass = across<Sum, M>(sum);
  const int64_t place = index * tiles.stride + first;
  __builtin_memcpy(tiles.peak + place, &peak, sizeof(float) * M);
  __builtin_memcpy(tiles.mass + place, &mass, sizeof(float) * M);
}

template <class Keys, class Operand, int N, int M, bool kPowers>
void score_tile(const Rows& rows, int64_t first, const Blocks& blocks,
                const Tile<typename Keys::Element>& tile, const Tiles& tiles) {
  Vec score[M][N];
  score_rows<Keys, Operand, N, M>(rows, first, blocks, tile, score);
  keep_statistics<N, M, kPowers>(score, first, tile.index, tiles);
}

// ---- Values

// Adds p[row][token] * value to M rows' sums over C vectors of dims, for kCount tokens that lie together.
template <class Keys, int M, int C, int kCount>
inline __attribute__((always_inline)) void add_tokens(const typename Keys::Element* values,
                                                      const Blocks& blocks, int64_t next_block,
                                                      const float* p, int64_t p_stride,
                                                      Vec (&sum)[M][C]) {
  constexpr int kBytes = LANES * Keys::kTokens * sizeof(typename Keys::Element);
  Vec value[C][Keys::kTokens];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    const auto* from = values + Keys::value_offset(0, c * LANES, blocks.size, blocks.dim);
    Keys::read_values(from, value[c]);
    if (c * kBytes % 64 == 0) __builtin_prefetch(from + next_block);
  }
#pragma GCC unroll 2
  for (int t = 0; t < kCount; ++t)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[m][c] += p[m * p_stride + t] * value[c][t];
}

// M rows' sums over C vectors of dims, scaled by `factor`, plus p[row][token] * value.
template <class Keys, int M, int C>
inline void add_values(const Blocks& blocks, const Tile<typename Keys::Element>& tile,
                       const typename Keys::Element* values, int64_t first_dim, int64_t tokens,
                       const float* p, int64_t p_stride, Vec factor, float* sums) {
  const int64_t dim = blocks.dim, step = Keys::value_step(dim);
  Vec sum[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[m][c] = load<Vec>(sums + m * dim + c * LANES) * factor[m];
  values += Keys::value_offset(tile.token, first_dim, blocks.size, dim);
  for (; tokens >= Keys::kTokens; tokens -= Keys::kTokens, p += Keys::kTokens, values += step)
    add_tokens<Keys, M, C, Keys::kTokens>(values, blocks, tile.next_block, p, p_stride, sum);
  // The slot beside a last token may hold NaN.
  if constexpr (Keys::kTokens == 2)
    if (tokens) add_tokens<Keys, M, C, 1>(values, blocks, tile.next_block, p, p_stride, sum);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(sums + m * dim + c * LANES, sum[m][c]);
}

template <class Keys, int M, int C>
inline void add_all_values(const Blocks& blocks, const Tile<typename Keys::Element>& tile,
                           const typename Keys::Element* values, int64_t first_dim, int64_t tokens,
                           const float* p, int64_t p_stride, Vec factor, float* sums) {
  for (; first_dim + C * LANES <= blocks.dim; first_dim += C * LANES)
    add_values<Keys, M, C>(blocks, tile, values, first_dim, tokens, p, p_stride, factor,
                           sums + first_dim);
  if constexpr (C > 1)
    add_all_values<Keys, M, C / 2>(blocks, tile, values, first_dim, tokens, p, p_stride, factor,
                                   sums);
}

// One step of online softmax: the tile's share of M rows' outputs, and its statistics.
template <class Keys, class Operand, int N, int M>
void attend_tile(const Rows& rows, int64_t first, const Blocks& blocks,
                 const Tile<typename Keys::Element>& tile, const typename Keys::Element* values,
                 const Tiles& tiles, const Output& output) {
  constexpr int kTokens = N * LANES;
  constexpr int kDims = M > 4 || M * REGISTERS > 64 ? 2 : M > 2 || M * REGISTERS > 32 ? 4 : 8;
  Vec score[M][N];
  score_rows<Keys, Operand, N, M>(rows, first, blocks, tile, score);
  const Vec before = load<Vec>(output.peak + first);
  const Vec peak = max(peaks<N, M>(score), before);
  const Vec factor = exp2(before - peak);
  float here[M * kTokens];
  float* const powers = powers_of<N>(tiles, tile.index, first);
  float* const p = powers ? powers : here;
  Vec sum[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    sum[m] = Vec{};
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      const Vec part = exp2(score[m][n] - peak[m]);
      store(p + m * kTokens + n * LANES, part);
      sum[m] += part;
    }
  }
  const Vec mass = across<Sum, M>(sum);
  const Vec total = load<Vec>(output.mass + first) * factor + mass;
  __builtin_memcpy(output.peak + first, &peak, sizeof(float) * M);
  __builtin_memcpy(output.mass + first, &total, sizeof(float) * M);
  if (tiles.mass) {
    const int64_t place = tile.index * tiles.stride + first;
    __builtin_memcpy(tiles.peak + place, &peak, sizeof(float) * M);
    __builtin_memcpy(tiles.mass + place, &mass, sizeof(float) * M);
  }
  // Slots behind the last token that a row sees may hold NaN, so they are skipped, not multiplied by 0.
  const int64_t last = first + M < rows.count ? first + M : rows.count;
  const int64_t left = rows.seen[last - 1] - tile.position;
  add_all_values<Keys, M, kDims>(blocks, tile, values, 0, left < kTokens ? left : kTokens, p,
                                 kTokens, factor, output.sums + first * blocks.dim);
}

}  // namespace
}  // namespace vllm_evict::ISA

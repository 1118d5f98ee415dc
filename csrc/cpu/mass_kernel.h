// The kernel. A source file for each instruction set includes it, after isa.h, which defines
//   ISA         the namespace of this copy, and its name,
//   LANES       floats in a vector register,
//   REGISTERS   how many such registers there are,
//   ROWS        query rows kept in registers together;
// and, if there are instructions for them,
//   WIDEN_U8    LANES uint8 in memory to uint16,
//   WIDEN_U16   LANES uint16 to uint32,
//   WIDEN_F16   LANES float16 to float32,
//   MULTIPLY_BYTES, SUM_PAIRS   see vectors.h,
//   DOT_BF16    float + dot product of two pairs of bfloat16, in each of LANES words,
//   AMX         that the CPU multiplies tiles of bfloat16.
// Use only GCC vector extensions and always-inline intrinsics here. The linker could
// replace a standard header's inline function by the copy of another source file, and
// a lambda does not inherit the file's target.

#include "mass.h"
#include "vectors.h"

#define VLLM_EVICT_STRING(x) #x
#define VLLM_EVICT_NAME(x) VLLM_EVICT_STRING(x)

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

// ---- Keys in memory

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

// ---- Scores

// Groups of 5 and 7 rows have no instances of their own, which would hardly be faster.
constexpr int padded_rows(int count) { return count == 5 ? 6 : count == 7 ? 8 : count; }
#if ROWS == 8
#define VLLM_EVICT_EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(6) CASE(8)
#else
#define VLLM_EVICT_EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4)
#endif

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

enum Task { kScore, kScoreTokens, kAttend };

// Scores the tiles of blocks [begin, end), with or without their powers, or attends to them.
template <class Keys, class Operand, int N, Task kTask>
void walk_blocks(const Rows& rows, const Blocks& blocks, int64_t begin, int64_t end,
                 const Tiles& tiles, const Output* output) {
  typedef typename Keys::Element Element;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t id = blocks.table[block];
    const int64_t next_id = blocks.table[block + 1 < end ? block + 1 : block];
    Tile<Element> tile;
    tile.block = (const Element*)blocks.keys + id * blocks.stride;
    tile.next_block = (next_id - id) * blocks.stride;
    for (tile.token = 0; tile.token < blocks.size; tile.token += N * LANES) {
      tile.position = block * blocks.size + tile.token;
      tile.index = tile.position / (N * LANES);
      for (int64_t first = 0; first < rows.count; first += ROWS) {
        const int64_t left = rows.count - first;
        const int count = left < ROWS ? (int)left : ROWS;
        if (rows.seen[first + count - 1] <= tile.position) continue;
        switch (padded_rows(count)) {
#define VLLM_EVICT_CASE(M)                                                                    \
  case M:                                                                                     \
    if constexpr (kTask == kAttend)                                                           \
      attend_tile<Keys, Operand, N, M>(rows, first, blocks, tile,                             \
                                       (const Element*)output->values + id * blocks.stride, \
                                       tiles, *output);                                       \
    else                                                                                      \
      score_tile<Keys, Operand, N, M, kTask == kScoreTokens>(rows, first, blocks, tile,       \
                                                             tiles);                          \
    break;
          VLLM_EVICT_EACH_COUNT(VLLM_EVICT_CASE)
#undef VLLM_EVICT_CASE
        }
      }
    }
  }
}

int64_t padded(int64_t count) { return padded_rows((int)count); }

// Two vectors if the block size, a multiple of 16, has room.
int64_t tile_tokens(int64_t block_size) { return block_size % (2 * LANES) ? LANES : 2 * LANES; }

template <class Keys, class Operand, Task kTask>
void walk(const Rows& rows, const Blocks& blocks, int64_t begin, int64_t end, const Tiles& tiles,
          const Output* output) {
#if LANES == 16
  if (tile_tokens(blocks.size) == LANES)
    return walk_blocks<Keys, Operand, 1, kTask>(rows, blocks, begin, end, tiles, output);
#endif
  walk_blocks<Keys, Operand, 2, kTask>(rows, blocks, begin, end, tiles, output);
}

#ifdef AMX
// ---- Products of tiles

// All eight registers hold 16 rows of 64 bytes: palette, row to begin with, bytes of a row, rows.
struct TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
alignas(64) const TileShapes tile_shapes;

// Products of kTileRows rows of queries, or half as many, and N groups of 16 tokens: [row][N * 16].
template <int N, bool kHalf>
inline void multiply_tiles(const Bf16* q, const Bf16* keys, int64_t dim, float* products) {
  constexpr int64_t kRow = N * LANES;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < dim; d += 32) {
    _tile_loadd(4, q + d, 2 * dim);
    _tile_loadd(6, keys + 16 * d, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) {
      _tile_loadd(7, keys + 16 * (dim + d), 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (!kHalf) {
      _tile_loadd(5, q + 16 * dim + d, 2 * dim);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (N == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, products, 4 * kRow);
  if constexpr (N == 2) _tile_stored(1, products + 16, 4 * kRow);
  if constexpr (!kHalf) {
    _tile_stored(2, products + 16 * kRow, 4 * kRow);
    if constexpr (N == 2) _tile_stored(3, products + 16 * kRow + 16, 4 * kRow);
  }
}

template <int N, int M, bool kPowers>
void score_products(const Rows& rows, int64_t first, int64_t position, int64_t index,
                    const float* products, const Tiles& tiles) {
  Vec score[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) score[m][n] = load<Vec>(products + (m * N + n) * LANES);
  finish_scores<N, M>(rows, first, position, score);
  keep_statistics<N, M, kPowers>(score, first, index, tiles);
}

// Scores the tiles of blocks [begin, end) for rows of Queries::tiles.
template <int N, Task kTask>
void score_tiles(const Rows& rows, const Blocks& blocks, int64_t begin, int64_t end,
                 const Tiles& tiles) {
  alignas(64) float products[kTileRows * N * LANES];
  _tile_loadconfig(&tile_shapes);
  for (int64_t token = begin * blocks.size; token < end * blocks.size; token += N * LANES) {
    const Bf16* keys = (const Bf16*)blocks.keys + blocks.table[token / blocks.size] * blocks.stride +
                       PairRows<Bf16>::offset(token % blocks.size, blocks.dim);
    for (int64_t first = 0; first < rows.count; first += kTileRows) {
      const int64_t end_row = first + kTileRows < rows.count ? first + kTileRows : rows.count;
      if (rows.seen[end_row - 1] <= token) continue;
      const Bf16* q = (const Bf16*)rows.q + first * blocks.dim;
      if (end_row - first > kTileRows / 2)
        multiply_tiles<N, false>(q, keys, blocks.dim, products);
      else
        multiply_tiles<N, true>(q, keys, blocks.dim, products);
      for (int64_t row = first; row < end_row; row += ROWS) {
        const int count = end_row - row < ROWS ? (int)(end_row - row) : ROWS;
        if (rows.seen[row + count - 1] <= token) continue;
        const float* from = products + (row - first) * N * LANES;
        switch (padded_rows(count)) {
#define VLLM_EVICT_CASE(M)                                                                  \
  case M:                                                                                   \
    score_products<N, M, kTask == kScoreTokens>(rows, row, token, token / (N * LANES), from, \
                                                tiles);                                     \
    break;
          VLLM_EVICT_EACH_COUNT(VLLM_EVICT_CASE)
#undef VLLM_EVICT_CASE
        }
      }
    }
  }
  _tile_release();
}
#endif

template <class Element, Task kTask>
void walk_floats(const Rows& rows, const Blocks& blocks, int64_t begin, int64_t end,
                 const Tiles& tiles, const Output* output) {
  return blocks.packing.amx
             ? walk<PairRows<Element>, Dims, kTask>(rows, blocks, begin, end, tiles, output)
             : walk<DimRows<Element>, Dims, kTask>(rows, blocks, begin, end, tiles, output);
}

template <Task kTask>
void walk_as(const Rows& rows, const Blocks& blocks, int64_t begin, int64_t end, const Tiles& tiles,
             const Output* output) {
#ifdef DOT_BF16
  if (rows.queries == Queries::pairs)
    return blocks.packing.amx
               ? walk<PairRows<Bf16>, Pairs, kTask>(rows, blocks, begin, end, tiles, output)
               : walk<DimRows<Bf16>, Pairs, kTask>(rows, blocks, begin, end, tiles, output);
#endif
  switch (blocks.packing.type) {
    case Type::f32:
      return walk<DimRows<float>, Dims, kTask>(rows, blocks, begin, end, tiles, output);
    case Type::f16:
      return walk<DimRows<F16>, Dims, kTask>(rows, blocks, begin, end, tiles, output);
    case Type::bf16:
      return walk_floats<Bf16, kTask>(rows, blocks, begin, end, tiles, output);
    case Type::e4m3:
      return walk_floats<E4m3, kTask>(rows, blocks, begin, end, tiles, output);
    case Type::e5m2:
      return walk_floats<E5m2, kTask>(rows, blocks, begin, end, tiles, output);
  }
}

template <Task kTask>
void score_as(const Rows& rows, const Blocks& blocks, int64_t begin, int64_t end,
              const Tiles& tiles) {
#ifdef AMX
  if (rows.queries == Queries::tiles)
    return tile_tokens(blocks.size) == LANES
               ? score_tiles<1, kTask>(rows, blocks, begin, end, tiles)
               : score_tiles<2, kTask>(rows, blocks, begin, end, tiles);
#endif
  walk_as<kTask>(rows, blocks, begin, end, tiles, nullptr);
}

void score(const Rows& rows, const Blocks& blocks, int64_t begin, int64_t end, const Tiles& tiles) {
  (tiles.powers ? score_as<kScoreTokens> : score_as<kScore>)(rows, blocks, begin, end, tiles);
}

void attend(const Rows& rows, const Blocks& blocks, int64_t begin, int64_t end, const Tiles& tiles,
            const Output& output) {
  walk_as<kAttend>(rows, blocks, begin, end, tiles, &output);
}

// ---- Masses

// Logits of LANES rows' sinks, from `row` on.
inline Vec sinks_of(const Rows& rows, int64_t row) {
  return rows.sinks ? load<Vec>(rows.sinks + row) : splat(-__builtin_inff());
}

// LANES rows, one for each lane. Converts `mass` to probabilities times the row's weight,
// and adds them to `total`. All are [num_tiles, stride].
void normalise(const float* peak, float* mass, float* total, int64_t stride, int64_t num_tiles,
               Vec weight, Vec sink) {
  const int64_t end = num_tiles * stride;
  Vec top = max(sink, splat(kUnseen));
  for (int64_t t = 0; t < end; t += stride) top = max(top, load<Vec>(peak + t));
  Vec sum = exp2(sink - top);
  for (int64_t t = 0; t < end; t += stride) {
    const Vec part = load<Vec>(mass + t) * exp2(load<Vec>(peak + t) - top);
    store(mass + t, part);
    sum += part;
  }
  // The sum of a row is at least 1, from its peak or sink. A lane without a row has weight 0. NaN stays.
  const Vec factor = weight / max(splat(1.f), sum);
  for (int64_t t = 0; t < end; t += stride) {
    // A row of weight 0 counts nothing, NaN neither.
    const Vec part = weight != 0.f ? load<Vec>(mass + t) * factor : Vec{};
    store(total + t, mass == total ? part : part + load<Vec>(total + t));
  }
}

void fold(const Rows& rows, int64_t block_size, int64_t num_blocks, const Tiles& tiles,
          float* out) {
  const int64_t per_block = block_size / tile_tokens(block_size);
  float* total = tiles.mass;
  for (int64_t row = 0; row < tiles.stride; row += LANES)
    normalise(tiles.peak + row, tiles.mass + row, total, tiles.stride, num_blocks * per_block,
              load<Vec>(rows.weights + row), sinks_of(rows, row));
  for (int64_t block = 0; block < num_blocks; ++block) {
    Vec sum = {};
    for (int64_t t = 0; t < per_block; ++t, total += tiles.stride) sum += load<Vec>(total);
    out[block] += across<Sum, 1>(&sum)[0];
  }
}

// LANES rows, one for each lane. Converts `mass` to factors that turn a tile's powers into
// probabilities times the row's weight. Both are [num_tiles, stride].
void find_factors(const float* peak, float* mass, int64_t stride, int64_t num_tiles, Vec weight,
                  Vec sink) {
  const int64_t end = num_tiles * stride;
  Vec top = max(sink, splat(kUnseen));
  for (int64_t t = 0; t < end; t += stride) top = max(top, load<Vec>(peak + t));
  Vec sum = exp2(sink - top);
  for (int64_t t = 0; t < end; t += stride) {
    const Vec scale = exp2(load<Vec>(peak + t) - top);
    sum += load<Vec>(mass + t) * scale;
    store(mass + t, scale);
  }
  const Vec factor = weight / max(splat(1.f), sum);
  for (int64_t t = 0; t < end; t += stride)
    store(mass + t, weight != 0.f ? load<Vec>(mass + t) * factor : Vec{});
}

template <int N>
void add_powers(const Rows& rows, int64_t num_tiles, const Tiles& tiles, float* out) {
  int64_t first = 0;  // first row that sees the tile; all later rows see it
  for (int64_t tile = 0; tile < num_tiles; ++tile, out += N * LANES) {
    while (first < rows.count && rows.seen[first] <= tile * N * LANES) ++first;
    const float* factor = tiles.mass + tile * tiles.stride;
    const float* powers = powers_of<N>(tiles, tile, first);
    Vec sum[N];
    for (int n = 0; n < N; ++n) sum[n] = load<Vec>(out + n * LANES);
    for (int64_t row = first; row < rows.count; ++row, powers += N * LANES)
      if (factor[row] != 0.f)
        for (int n = 0; n < N; ++n) sum[n] += factor[row] * load<Vec>(powers + n * LANES);
    for (int n = 0; n < N; ++n) store(out + n * LANES, sum[n]);
  }
}

void fold_tokens(const Rows& rows, int64_t block_size, int64_t num_blocks, const Tiles& tiles,
                 float* out) {
  const int64_t num_tiles = num_blocks * (block_size / tile_tokens(block_size));
  for (int64_t row = 0; row < tiles.stride; row += LANES)
    find_factors(tiles.peak + row, tiles.mass + row, tiles.stride, num_tiles,
                 load<Vec>(rows.weights + row), sinks_of(rows, row));
  if (tile_tokens(block_size) == LANES)
    add_powers<1>(rows, num_tiles, tiles, out);
  else
    add_powers<2>(rows, num_tiles, tiles, out);
}

#ifdef DOT_BF16
constexpr bool kDotsPairs = true;
#else
constexpr bool kDotsPairs = false;
#endif

#ifdef AMX
constexpr bool kDotsTiles = true;
#else
constexpr bool kDotsTiles = false;
#endif

const Kernel kernel = {VLLM_EVICT_NAME(ISA), ROWS, kDotsPairs, kDotsTiles, tile_tokens,
                       padded, score, attend, fold, fold_tokens};

}  // namespace
}  // namespace vllm_evict::ISA

// The kernel. A source file for each instruction set includes it, after isa.h, which defines
//   ISA         the namespace of this copy, and its name,
//   LANES       floats in a vector register,
//   REGISTERS   how many such registers there are,
//   ROWS        query rows kept in registers together;
// and, if there are instructions for them,
//   WIDEN_U8    LANES uint8 in memory to uint16,
//   WIDEN_U16   LANES uint16 to uint32,
//   WIDEN_F16   LANES float16 to float32,
//   DOT_BYTES, or MULTIPLY_BYTES and SUM_PAIRS   see vectors.h,
//   DOT_BF16    float + dot product of two pairs of bfloat16, in each of LANES words,
//   AMX         that the CPU multiplies tiles of bfloat16.
// Use only GCC vector extensions and always-inline intrinsics here. The linker could
// replace a standard header's inline function by the copy of another source file, and
// a lambda does not inherit the file's target.

#include "mass_fold.h"
#include "mass_tile.h"

#define VLLM_EVICT_STRING(x) #x
#define VLLM_EVICT_NAME(x) VLLM_EVICT_STRING(x)

namespace vllm_evict::ISA {
namespace {

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

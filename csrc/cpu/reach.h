// Blocks that layers of decodes read, wherever they live: the interface between reach.cpp, which
// chooses, fetches and writes the table, and the kernels that score (reach_kernel.h, compiled once
// for each instruction set).
#pragma once

#include <cstdint>

#include "mass.h"

namespace vllm_evict {

// What blocks are scored by (compute/kernels/codes.py, signs.py and bounds.py): `width` numbers for each KV
// head of each block, in order: bytes of codes, words of 16 bits of signs, or boxes of up to 32 tokens each,
// of `type`, largest values first.
enum class Kind { codes, signs, boxes };
struct ReachIndex {
  const void* data;
  Kind kind;
  Type type;
  int64_t blocks, kv_heads, width, block_size;
};

// One layer of one step (compute/kernels/reach.py). Strides count elements.
struct ReachArgs {
  const void* query;  // [tokens, heads, dim]
  Type query_type;
  int64_t query_token_stride, query_head_stride, heads, dim;
  ReachIndex index;
  float scale, soft_cap;
  // Logits that belong to no block, or null: [heads], with a stride of 0, or [tokens, heads].
  const float* sinks;
  int64_t sink_stride;
  float* scores;  // [slots, width], of full blocks: written by layers that lead, else read
  bool leads;
  int64_t fetch;  // most blocks that come into a room; 0: any number
  // Of each row: its first query, and how many it has; its full blocks, which are scored, and all its
  // blocks; candidates [first, end); how many are chosen; blocks of its room; its row in arrays of
  // slots; its row in `written` and `out`; whether it chooses, or reads what it chose last.
  const int32_t *queries, *query_counts, *full, *blocks, *first, *end, *chosen, *rooms, *slots,
      *out_rows, *chooses;
  int64_t rows;
  const int32_t* written;  // [>= rows, written_width], of each logical block its block of the pool
  int64_t written_stride, written_width;
  const int32_t* numbers;  // [slots, width], of each logical block its host block, or -1
  int64_t width;
  int64_t pool;  // place in the index of host block 0; a block of the pool has its own
  // [slots, room]: logical block in each block of a room; step that read it last; chosen blocks.
  int32_t *held, *read, *picked;
  int32_t* counts;  // [slots, 3], added up: blocks that came, that were there, that `fetch` cut
  int64_t num_slots, room;
  int32_t step;
  char* cache;       // pages of the pool
  const char* host;  // pages of the host
  int64_t cache_stride, host_stride, page_bytes, cache_pages, host_pages;
  int32_t* out;  // [>= rows, out_width], block table
  int64_t out_stride, out_width, num_out_rows;
};

// Writes logits[query * stride + n], in base 2, what attention one KV head of the block at places[n] may draw.
// `query`: floats [count, 2 * dim]; for boxes positive parts first, else the query first.
// `scratch`: 16 floats a dimension.
using BlockLogits = void (*)(const float* query, int64_t count, int64_t dim, const ReachIndex&,
                             int64_t head, float soft_cap, const int32_t* places, int64_t num,
                             float* scratch, float* logits, int64_t stride);

// Makes logits in base 2 of `num` blocks, of `padded` that are there, the shares of attention that they stand for beside
// a sink. `padded` is a multiple of 16. Those of blocks whose logits are not finite are NaN.
using Shares = void (*)(float* logits, int64_t num, int64_t padded, float sink);

// Rows of so many queries or more are tiles: if blocks are scored by signs, sums of each four numbers of their queries
// are rounded, and a block's best token stands for it. A byte holds sums of so many dimensions.
constexpr int64_t kTileQueries = 16, kTileDims = 256;

// Steps each way that the magnitudes of a query have together. Four numbers round by half a step at most.
constexpr float tile_steps(int64_t dim) { return static_cast<float>(127 - dim / 8); }

// Packs one KV head of at most `panel` blocks for TileShares.
using PackPanel = void (*)(const ReachIndex&, int64_t head, int64_t dim, const int32_t* places,
                           int64_t num, float* panel);

// Adds to shares[token * padded + n] the share of attention that query heads of one KV head may pay to
// block n of `num`, which `padded` is, rounded up to whole panels. `query`: as of BlockLogits, [count, group, 2 * dim];
// `sinks`: of the first query, [group], or null; `scratch`: floats for [count, group, padded + 1 + dim].
using TileShares = void (*)(const float* query, int64_t count, int64_t group, int64_t dim,
                            int64_t block_size, float soft_cap, const float* sinks,
                            int64_t sink_stride, const float* panels, int64_t num, float* scratch,
                            float* shares);

// Write the index of one KV head of a block by signs, or at two bits a number: of keys [block_size, dim].
using KeySigns = void (*)(const float* keys, int64_t dim, int64_t block_size, uint16_t* index);
using KeyCodes = void (*)(const float* keys, int64_t dim, int64_t block_size, uint8_t* index);

// Tokens that share middles and steps, or 16, and bytes of what stands for `tokens` of them.
constexpr int64_t kGroup = 32;
constexpr int64_t code_bytes(int64_t tokens, int64_t dim) { return tokens * dim / 4 + 2 * dim + 8; }
// Bytes of one KV head of a block, and tokens of a block by them.
constexpr int64_t coded_bytes(int64_t block_size, int64_t dim) {
  return block_size / kGroup * code_bytes(kGroup, dim) + (block_size % kGroup ? code_bytes(16, dim) : 0);
}
constexpr int64_t coded_tokens(int64_t width, int64_t dim) {
  return width / code_bytes(kGroup, dim) * kGroup + (width % code_bytes(kGroup, dim) ? 16 : 0);
}

struct ReachKernel {
  BlockLogits logits;
  Shares shares;
  KeySigns signs;
  KeyCodes codes;
  int64_t panel;                                            // blocks
  int64_t (*panel_floats)(int64_t dim, int64_t block_size);
  PackPanel pack;
  TileShares tile;
};
// Null if the compiler or the architecture lacks the instruction set.
extern const ReachKernel *const avx512_vnni_reach, *const avx512_reach, *const avx2_reach, *const portable_reach;

// Throws std::invalid_argument, before it writes anything, if an index is out of range.
void reach(const ReachArgs&, const ReachKernel&, int threads);

}  // namespace vllm_evict

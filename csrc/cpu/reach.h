// Blocks that layers of decodes read, wherever they live: the interface between reach.cpp, which
// chooses, fetches and writes the table, and the kernels that score (reach_kernel.h, compiled once
// for each instruction set).
#pragma once

#include <cstdint>

#include "mass.h"

namespace vllm_evict {

// One layer of one step (compute/kernels/reach.py). Strides count elements.
struct ReachArgs {
  const void* query;  // [tokens, heads, dim]
  Type query_type;
  int64_t query_token_stride, query_head_stride, heads, kv_heads, dim;
  const void* boxes;  // [boxes, kv_heads, 2 * dim], largest values first
  Type box_type;
  int64_t num_boxes;
  float scale, soft_cap;
  const float* sinks;  // [heads], logits that belong to no block, or null
  // Of each row: its query; its full blocks; candidates [first, end); how many are chosen; blocks of
  // its room; its row in `numbers`, `held`, `read` and `picked`; its row in `written` and `out`;
  // whether it chooses, or reads what it chose last.
  const int32_t *queries, *full, *first, *end, *chosen, *rooms, *slots, *out_rows, *chooses;
  int64_t rows;
  const int32_t* written;  // [>= rows, written_width], of each logical block its block of the pool
  int64_t written_stride, written_width;
  const int32_t* numbers;  // [slots, width], of each logical block its host block, or -1
  int64_t width;
  int64_t pool;  // place in `boxes` of host block 0; a block of the pool has its own
  // [slots, room]: logical block in each block of a room; step that read it last; chosen blocks.
  int32_t *held, *read, *picked;
  int64_t num_slots, room;
  int32_t step;
  char* cache;       // pages of the pool
  const char* host;  // pages of the host
  int64_t cache_stride, host_stride, page_bytes, cache_pages, host_pages;
  int32_t* out;  // [>= rows, out_width], block table
  int64_t out_stride, out_width, num_out_rows;
};

struct ReachCounts {
  int64_t from_host, in_room;
};

// Writes products[query * stride + n] = q * the larger corner of box n, for boxes at `places`.
// `query`: floats [count, 2 * dim], positive parts first.
using BoxProducts = void (*)(const float* query, int64_t count, int64_t dim, const void* boxes,
                             Type type, int64_t box_stride, const int32_t* places, int64_t num,
                             float* products, int64_t stride);
// Null if the compiler or the architecture lacks the instruction set.
extern const BoxProducts avx512_boxes, avx2_boxes, portable_boxes;

// Throws std::invalid_argument, before it writes anything, if an index is out of range.
ReachCounts reach(const ReachArgs&, BoxProducts, int threads);

}  // namespace vllm_evict

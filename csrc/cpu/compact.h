// Kept tokens of each KV head moved together, in the packed pages of many layers.
#pragma once

#include <cstdint>
#include <vector>

namespace vllm_evict {

// One layer's pages [num_blocks, kv_heads, 2 * block_size * dim], keys before values. Strides count
// bytes.
struct LayerPages {
  char* pages;
  int64_t block_stride, head_stride;
};

// Tokens of one group of keys: of each row, the words at `column`, ascending, go to where `to`
// begins, in order. The two may lie in one block, with `to` at or before the first column.
struct KeyRun {
  const char* from;
  char* to;
  const int32_t* column;
  int64_t count;
  int64_t columns, rows;  // words of a row, rows of a group
  int64_t next;           // bytes from `from` to what is read after this run
};
typedef void (*MoveRows)(const KeyRun&);

// For words of 1, 2 and 4 bytes. Null where compiler or architecture lack the instruction set.
extern const MoveRows* const avx512_moves;
extern const MoveRows* const portable_moves;

struct CompactArgs {
  std::vector<LayerPages> layers;
  int64_t num_blocks, kv_heads, block_size, dim, item_bytes;
  bool amx;  // else "vec"
  const int32_t *source, *target;
  const int32_t* keep;  // [layers, kv_heads, kept of all requests]
  int64_t keep_layer_stride, keep_head_stride;
  // [requests + 1] each: where a request's share of the three begins.
  const int32_t *source_starts, *keep_starts, *target_starts;
  int64_t requests, sources, kept, targets;
};

// The same bits for any number of threads. Throws std::invalid_argument, before anything is
// written, where a block id, token or offset is out of range, or a target block is one twice or a
// source of another request.
void compact(const CompactArgs&, const MoveRows* moves, int threads);

}  // namespace vllm_evict

// Compaction of kept tokens in the packed pages of several layers (compute/kernels/compact.py).
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

// Tokens of one group of keys. The words of each row at `column`, ascending, are copied in order to the
// begin of `to`, which may lie in the same block, at or before the first column.
struct KeyRun {
  const char* from;
  char* to;
  const int32_t* column;
  int64_t count;
  int64_t columns, rows;  // words of a row, rows of a group
  int64_t next;           // bytes from `from` to the next run
};
typedef void (*MoveRows)(const KeyRun&);

// For words of 1, 2 and 4 bytes. Null if compiler or architecture lack the instruction set.
extern const MoveRows* const avx512_moves;
extern const MoveRows* const portable_moves;

struct CompactArgs {
  std::vector<LayerPages> layers;
  int64_t num_blocks, kv_heads, block_size, dim, item_bytes;
  bool amx;  // else "vec"
  const int32_t *source, *target;
  const int32_t* keep;  // [layers, kv_heads, kept of all requests]
  int64_t keep_layer_stride, keep_head_stride;
  // [requests + 1] each, offsets of requests in source, keep and target.
  const int32_t *source_starts, *keep_starts, *target_starts;
  int64_t requests, sources, kept, targets;
};

// The same bits for any number of threads. Throws std::invalid_argument, before it writes anything, if a
// block id, token or offset is out of range, or if a target block occurs twice or is a source of another
// request.
void compact(const CompactArgs&, const MoveRows* moves, int threads);

}  // namespace vllm_evict

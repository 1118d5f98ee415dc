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
void compact(const CompactArgs&, int threads);

}  // namespace vllm_evict

// Views: block tables without holes (compute/kernels/view.py).
#pragma once

#include <cstdint>

namespace vllm_evict {

struct ViewArgs {
  const int32_t* table;  // [requests, >= ceil(lens / block_size)], 0 is a hole
  int64_t table_stride, table_width;
  const int32_t* lens;  // [requests]
  int64_t requests, block_size;
  int32_t* out_table;  // [requests, out_width]
  int64_t out_stride, out_width;
  int32_t* out_lens;     // [requests]
  int32_t* out_logical;  // [requests, logical_width] or null
  int64_t logical_stride, logical_width;
};

// Throws std::invalid_argument if a length or a width is out of range.
void resident_view(const ViewArgs&, int threads);

}  // namespace vllm_evict

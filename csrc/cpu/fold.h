// Running sums: a step's mass goes to its logical blocks (compute/kernels/fold.py).
#pragma once

#include <cstdint>

namespace vllm_evict {

struct FoldArgs {
  float* sums;  // [slots, heads, blocks]
  int64_t sum_slot_stride, sum_head_stride, slots, blocks;
  const int32_t* slot_of;  // [requests], -1: the row is not measured
  const float* mass;       // [requests, heads, width]
  int64_t mass_request_stride, mass_head_stride, requests, heads, width;
  const int32_t* logical;  // [requests, width], -1 past the end
  int64_t logical_stride;
  const float* kept;  // [requests] or null: the factor of the sums before
};

// Throws std::invalid_argument if a slot is out of range. Blocks past the sums are left out.
void fold(const FoldArgs&);

}  // namespace vllm_evict

#include "fold.h"

#include <algorithm>
#include <stdexcept>

namespace vllm_evict {

void fold(const FoldArgs& a) {
  if (std::any_of(a.slot_of, a.slot_of + a.requests, [&](int32_t s) { return s >= a.slots; }))
    throw std::invalid_argument("slots must be rows of sums, or -1");
  for (int64_t r = 0; r < a.requests; ++r) {
    if (a.slot_of[r] < 0) continue;
    const int32_t* logical = a.logical + r * a.logical_stride;
    const float kept = a.kept ? a.kept[r] : 1.0f;
    for (int64_t h = 0; h < a.heads; ++h) {
      float* sums = a.sums + a.slot_of[r] * a.sum_slot_stride + h * a.sum_head_stride;
      const float* mass = a.mass + r * a.mass_request_stride + h * a.mass_head_stride;
      for (int64_t w = 0; w < a.width; ++w)
        if (logical[w] >= 0 && logical[w] < a.blocks)
          sums[logical[w]] = kept * sums[logical[w]] + mass[w];
    }
  }
}

}  // namespace vllm_evict

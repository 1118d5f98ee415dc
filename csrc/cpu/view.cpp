#include "view.h"

#include <algorithm>
#include <stdexcept>

namespace vllm_evict {
namespace {

constexpr int64_t kSerialEntries = 1 << 15;  // below this size one thread is faster

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_row(const ViewArgs& a, int64_t r) {
  const int32_t* table = a.table + r * a.table_stride;
  const int64_t blocks = ceil_div(a.lens[r], a.block_size);
  if (a.lens[r] < 0 || blocks > a.table_width)
    throw std::invalid_argument("seq_lens must be from 0 to what block_table's width holds");
  const int64_t kept = blocks - std::count(table, table + blocks, 0);
  if (kept > a.out_width || (a.out_logical && kept > a.logical_width))
    throw std::invalid_argument("out_table and out_logical must be as wide as the longest row");
}

void squeeze_row(const ViewArgs& a, int64_t r) {
  const int32_t* table = a.table + r * a.table_stride;
  int32_t* out = a.out_table + r * a.out_stride;
  int32_t* logical = a.out_logical ? a.out_logical + r * a.logical_stride : nullptr;
  const int64_t blocks = ceil_div(a.lens[r], a.block_size);
  int64_t kept = 0;
  for (int64_t j = 0; j < blocks; ++j) {
    if (table[j] == 0) continue;
    out[kept] = table[j];
    if (logical) logical[kept] = static_cast<int32_t>(j);
    ++kept;
  }
  std::fill(out + kept, out + a.out_width, 0);
  if (logical) std::fill(logical + kept, logical + a.logical_width, -1);
  a.out_lens[r] = static_cast<int32_t>(a.lens[r] - (blocks - kept) * a.block_size);
}

}  // namespace

void resident_view(const ViewArgs& a, int threads) {
  for (int64_t r = 0; r < a.requests; ++r) check_row(a, r);
#pragma omp parallel for num_threads(threads) if (a.requests * a.out_width > kSerialEntries)
  for (int64_t r = 0; r < a.requests; ++r) squeeze_row(a, r);
}

}  // namespace vllm_evict

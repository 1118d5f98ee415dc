// Shared by block_mass, decode_mass and prompt_mass: checks of a batch, its queries in the kernels'
// layout, and the output.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "mass.h"

namespace vllm_evict {

constexpr int64_t kPieceTokens = 512;     // keys of a piece, the least work of a thread
constexpr int64_t kSerialWork = 1 << 17;  // multiply-adds below which one thread is faster
constexpr float kLog2e = 1.44269504f;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline void require(bool valid, const char* sentence) {
  if (!valid) throw std::invalid_argument(sentence);
}

inline void check_starts(const MassArgs& a) {
  bool ascending = a.starts[0] >= 0 && a.starts[a.requests] <= a.tokens;
  for (int64_t r = 0; r < a.requests; ++r) ascending &= a.starts[r] <= a.starts[r + 1];
  require(ascending, "query_start_loc must ascend within 0 and T");
}

inline void check_blocks(const MassArgs& a, int64_t r, int64_t blocks) {
  require(a.lens[r] >= a.starts[r + 1] - a.starts[r], "seq_lens must include the queries");
  require(blocks <= a.table_width && (!a.out || a.per_token || blocks <= a.out_width),
          "block_table and mass must be as wide as the longest request has blocks");
  require(!a.out || !a.per_token || a.lens[r] <= a.out_width,
          "mass must be as wide as the longest request has tokens");
  bool valid = true;
  for (int64_t j = 0; j < blocks; ++j) {
    const int32_t block = a.table[r * a.table_stride + j];
    valid &= block >= 0 && block < a.num_blocks;
  }
  require(valid, "block_table must hold block ids of key_cache");
}

// Entries that fold() or fold_tokens() writes for a request, and how many of them `out` has.
inline int64_t folded(const MassArgs& a, int64_t blocks) {
  return a.per_token ? blocks * a.block_size : blocks;
}
inline int64_t entries(const MassArgs& a, int64_t r, int64_t blocks) {
  return a.per_token ? a.lens[r] : blocks;
}

// How a kernel takes `rows` rows. A register of AMX holds 32 dims of 16 rows; fewer rows waste it.
inline Queries queries_of(const MassArgs& a, const Kernel& kernel, int64_t rows, bool attends) {
  if (a.packing.type != Type::bf16 || a.query_type != Type::bf16 || !kernel.dots_pairs)
    return Queries::floats;
  const bool tiles = kernel.dots_tiles && a.packing.amx && a.dim % 32 == 0;
  return tiles && !attends && rows >= kTileRows / 2 ? Queries::tiles : Queries::pairs;
}

// Rows as the kernel stores them in Tiles::powers.
inline int64_t power_rows(const Kernel& kernel, int64_t rows) {
  const int64_t last = rows % kernel.rows;
  return rows - last + kernel.padded(last);
}

// Rows::sinks of rows whose heads follow each other.
inline void fill_sinks(const MassArgs& a, int64_t first_head, int64_t rows, int64_t columns,
                       float* sinks) {
  if (!a.sinks) return;
  const int64_t group = a.heads / a.kv_heads;
  for (int64_t row = 0; row < rows; ++row)
    sinks[row] = a.sinks[first_head + row % group] * kLog2e;
  std::fill(sinks + rows, sinks + columns, kUnseen);
}

// Replaces the softmax sums of `count` rows by factors that turn Output::sums into outputs.
inline void to_factors(const MassArgs& a, const Rows& rows, int64_t count, const float* peak,
                       float* mass) {
  for (int64_t row = 0; row < count; ++row) {
    if (!rows.sinks) {
      mass[row] = a.value_scale / mass[row];
      continue;
    }
    const float top = std::max(peak[row], rows.sinks[row]);  // NaN stays
    const float ours = std::exp2(peak[row] - top);
    mass[row] = a.value_scale * ours / (mass[row] * ours + std::exp2(rows.sinks[row] - top));
  }
}

template <class T>
inline void write_rows_as(const DecodeArgs& d, const int32_t* tokens, int64_t first_head,
                          int64_t rows, const float* sums, const float* factor) {
  const int64_t group = d.mass.heads / d.mass.kv_heads;
  for (int64_t row = 0; row < rows; ++row, sums += d.mass.dim) {
    T* to = static_cast<T*>(d.output) + tokens[row / group] * d.output_token_stride +
            (first_head + row % group) * d.output_head_stride;
    for (int64_t dim = 0; dim < d.mass.dim; ++dim)
      to[dim] = static_cast<T>(sums[dim] * factor[row]);
  }
}

// Writes the output of rows whose heads follow each other.
inline void write_rows(const DecodeArgs& d, const int32_t* tokens, int64_t first_head,
                       int64_t rows, const float* sums, const float* factor) {
  const auto write = d.mass.query_type == Type::bf16  ? write_rows_as<c10::BFloat16>
                     : d.mass.query_type == Type::f16 ? write_rows_as<c10::Half>
                                                      : write_rows_as<float>;
  write(d, tokens, first_head, rows, sums, factor);
}

template <class T>
inline void pack_floats(const T* from, int64_t dim, float* to, int64_t step) {
  for (int64_t d = 0; d < dim; ++d) to[d * step] = static_cast<float>(from[d]);
}

inline void pack_pairs(const c10::BFloat16* from, int64_t dim, uint32_t* to, int64_t step) {
  for (int64_t d = 0; d < dim; d += 2, to += step)
    *to = from[d].x | static_cast<uint32_t>(from[d + 1].x) << 16;
}

// The layout of Rows::q, with zeros where a group is padded.
inline void pack_queries(const MassArgs& a, const Kernel& kernel, const int32_t* tokens,
                         int64_t first_head, int64_t rows, Queries queries, float* q) {
  const int64_t group = a.heads / a.kv_heads;
  if (queries == Queries::tiles) {
    auto to = reinterpret_cast<c10::BFloat16*>(q);
    for (int64_t row = 0; row < rows; ++row, to += a.dim)
      std::memcpy(to,
                  static_cast<const c10::BFloat16*>(a.query) +
                      tokens[row / group] * a.query_token_stride +
                      (first_head + row % group) * a.query_head_stride,
                  a.dim * sizeof(*to));
    std::memset(to, 0, (round_up(rows, kTileRows) - rows) * a.dim * sizeof(*to));
    return;
  }
  const bool pairs = queries == Queries::pairs;
  const int64_t words = pairs ? a.dim / 2 : a.dim;
  for (int64_t begin = 0; begin < rows; begin += kernel.rows) {
    const int64_t count = std::min(kernel.rows, rows - begin);
    const int64_t step = kernel.padded(count);
    float* to = q + begin * words;
    if (step > count) std::memset(to, 0, step * words * sizeof(float));
    for (int64_t row = begin; row < begin + count; ++row, ++to) {
      const int64_t offset = tokens[row / group] * a.query_token_stride +
                             (first_head + row % group) * a.query_head_stride;
      const auto bf16 = static_cast<const c10::BFloat16*>(a.query) + offset;
      if (pairs)
        pack_pairs(bf16, a.dim, reinterpret_cast<uint32_t*>(to), step);
      else if (a.query_type == Type::bf16)
        pack_floats(bf16, a.dim, to, step);
      else if (a.query_type == Type::f16)
        pack_floats(static_cast<const c10::Half*>(a.query) + offset, a.dim, to, step);
      else
        pack_floats(static_cast<const float*>(a.query) + offset, a.dim, to, step);
    }
  }
}

}  // namespace vllm_evict

// Statistics of all tiles of a request become probabilities, added up by block or by token.
#pragma once

#include "mass_tile.h"

namespace vllm_evict::ISA {
namespace {

// Logits of LANES rows' sinks, from `row` on.
inline Vec sinks_of(const Rows& rows, int64_t row) {
  return rows.sinks ? load<Vec>(rows.sinks + row) : splat(-__builtin_inff());
}

// LANES rows, one for each lane. Converts `mass` to probabilities times the row's weight,
// and adds them to `total`. All are [num_tiles, stride].
void normalise(const float* peak, float* mass, float* total, int64_t stride, int64_t num_tiles,
               Vec weight, Vec sink) {
  const int64_t end = num_tiles * stride;
  Vec top = max(sink, splat(kUnseen));
  for (int64_t t = 0; t < end; t += stride) top = max(top, load<Vec>(peak + t));
  Vec sum = exp2(sink - top);
  for (int64_t t = 0; t < end; t += stride) {
    const Vec part = load<Vec>(mass + t) * exp2(load<Vec>(peak + t) - top);
    store(mass + t, part);
    sum += part;
  }
  // The sum of a row is at least 1, from its peak or sink. A lane without a row has weight 0. NaN stays.
  const Vec factor = weight / max(splat(1.f), sum);
  for (int64_t t = 0; t < end; t += stride) {
    // A row of weight 0 counts nothing, NaN neither.
    const Vec part = weight != 0.f ? load<Vec>(mass + t) * factor : Vec{};
    store(total + t, mass == total ? part : part + load<Vec>(total + t));
  }
}

void fold(const Rows& rows, int64_t block_size, int64_t num_blocks, const Tiles& tiles,
          float* out) {
  const int64_t per_block = block_size / tile_tokens(block_size);
  float* total = tiles.mass;
  for (int64_t row = 0; row < tiles.stride; row += LANES)
    normalise(tiles.peak + row, tiles.mass + row, total, tiles.stride, num_blocks * per_block,
              load<Vec>(rows.weights + row), sinks_of(rows, row));
  for (int64_t block = 0; block < num_blocks; ++block) {
    Vec sum = {};
    for (int64_t t = 0; t < per_block; ++t, total += tiles.stride) sum += load<Vec>(total);
    out[block] += across<Sum, 1>(&sum)[0];
  }
}

// LANES rows, one for each lane. Converts `mass` to factors that turn a tile's powers into
// probabilities times the row's weight. Both are [num_tiles, stride].
void find_factors(const float* peak, float* mass, int64_t stride, int64_t num_tiles, Vec weight,
                  Vec sink) {
  const int64_t end = num_tiles * stride;
  Vec top = max(sink, splat(kUnseen));
  for (int64_t t = 0; t < end; t += stride) top = max(top, load<Vec>(peak + t));
  Vec sum = exp2(sink - top);
  for (int64_t t = 0; t < end; t += stride) {
    const Vec scale = exp2(load<Vec>(peak + t) - top);
    sum += load<Vec>(mass + t) * scale;
    store(mass + t, scale);
  }
  const Vec factor = weight / max(splat(1.f), sum);
  for (int64_t t = 0; t < end; t += stride)
    store(mass + t, weight != 0.f ? load<Vec>(mass + t) * factor : Vec{});
}

template <int N>
void add_powers(const Rows& rows, int64_t num_tiles, const Tiles& tiles, float* out) {
  int64_t first = 0;  // first row that sees the tile; all later rows see it
  for (int64_t tile = 0; tile < num_tiles; ++tile, out += N * LANES) {
    while (first < rows.count && rows.seen[first] <= tile * N * LANES) ++first;
    const float* factor = tiles.mass + tile * tiles.stride;
    const float* powers = powers_of<N>(tiles, tile, first);
    Vec sum[N];
    for (int n = 0; n < N; ++n) sum[n] = load<Vec>(out + n * LANES);
    for (int64_t row = first; row < rows.count; ++row, powers += N * LANES)
      if (factor[row] != 0.f)
        for (int n = 0; n < N; ++n) sum[n] += factor[row] * load<Vec>(powers + n * LANES);
    for (int n = 0; n < N; ++n) store(out + n * LANES, sum[n]);
  }
}

void fold_tokens(const Rows& rows, int64_t block_size, int64_t num_blocks, const Tiles& tiles,
                 float* out) {
  const int64_t num_tiles = num_blocks * (block_size / tile_tokens(block_size));
  for (int64_t row = 0; row < tiles.stride; row += LANES)
    find_factors(tiles.peak + row, tiles.mass + row, tiles.stride, num_tiles,
                 load<Vec>(rows.weights + row), sinks_of(rows, row));
  if (tile_tokens(block_size) == LANES)
    add_powers<1>(rows, num_tiles, tiles, out);
  else
    add_powers<2>(rows, num_tiles, tiles, out);
}

}  // namespace
}  // namespace vllm_evict::ISA

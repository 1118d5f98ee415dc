// Logits of blocks: products of queries with boxes, or with signs of keys. A source file for each instruction set
// includes it, after isa.h (see mass_kernel.h).

#include "reach.h"
#include "vectors.h"

namespace vllm_evict::ISA {
namespace {

inline float sum_of(Vec v) {
  float total = 0;
  for (int i = 0; i < LANES; ++i) total += v[i];
  return total;
}

template <class T>
void box_logits(const float* query, int64_t count, int64_t dim, const T* boxes, int64_t stride,
                const int32_t* places, int64_t num, float* logits, int64_t out_stride) {
  const int64_t size = 2 * dim;
  for (int64_t n = 0; n < num; ++n) {
    const T* box = boxes + places[n] * stride;
    for (int64_t q = 0; q < count; ++q) {
      const float* own = query + q * size;
      Vec sum{};
      for (int64_t d = 0; d < size; d += LANES) sum += load<Vec>(own + d) * widen(box + d);
      logits[q * out_stride + n] = sum_of(sum);
    }
  }
}

constexpr int64_t kQueries = 4;  // that read the signs together
constexpr float kLog2e = 1.44269504f;

// The log of the sum of exp(logit) over a block's tokens, for up to kQueries queries. A key is taken
// for its block's centre + its scale in the direction of its signs. A block has its centre [dim], the
// scales of its tokens, and for each 16 tokens and dimension a word with a bit for each token.
void sign_logits(const float* query, int64_t count, int64_t dim, const uint16_t* index,
                 int64_t stride, int64_t block_size, float soft_cap, const int32_t* places,
                 int64_t num, float* logits, int64_t out_stride) {
  const WordVec lane = WordVec{} + 1 << (WordVec)lane_numbers(Lanes{});
  float total[kQueries] = {};
  for (int64_t q = 0; q < count; ++q)
    for (int64_t d = 0; d < dim; ++d) total[q] += query[2 * q * dim + d];
  for (int64_t n = 0; n < num; ++n) {
    const uint16_t* centre = index + places[n] * stride;
    const uint16_t* scales = centre + dim;
    Vec base[kQueries], peak[kQueries], sum[kQueries];
    for (int64_t q = 0; q < count; ++q) {
      Vec product{};
      for (int64_t d = 0; d < dim; d += LANES)
        product += load<Vec>(query + 2 * q * dim + d) * widen((const Bf16*)(centre + d));
      base[q] = splat(sum_of(product));
      peak[q] = splat(-1e30f);
      sum[q] = Vec{};
    }
    for (int64_t t = 0; t < block_size; t += LANES) {
      const uint16_t* words = scales + block_size + t / 16 * dim;
      Vec own[kQueries] = {};
      for (int64_t d = 0; d < dim; ++d) {
        const WordVec word = WordVec{} + ((uint32_t)words[d] >> t % 16);
        const WordVec is_set = (WordVec)((word & lane) != 0);
        for (int64_t q = 0; q < count; ++q)
          own[q] += (Vec)(is_set & (WordVec)splat(query[2 * q * dim + d]));
      }
      const Vec scale = widen((const Bf16*)(scales + t));
      for (int64_t q = 0; q < count; ++q) {
        Vec x = base[q] + scale * (2 * own[q] - total[q]);
        if (soft_cap > 0) x = soft_capped(x, soft_cap);
        x *= kLog2e;
        const Vec top = max(peak[q], x);
        sum[q] = sum[q] * exp2(peak[q] - top) + exp2(x - top);
        peak[q] = top;
      }
    }
    for (int64_t q = 0; q < count; ++q) {
      float top = peak[q][0];
      for (int i = 1; i < LANES; ++i) top = peak[q][i] > top ? peak[q][i] : top;
      const float all = sum_of(sum[q] * exp2(peak[q] - top));
      logits[q * out_stride + n] = top / kLog2e + __builtin_logf(all);
    }
  }
}

// ---- Many queries of one KV head: a lane is a query

constexpr int kVectors = 2, kTokens = LANES == 16 ? 8 : 4;  // whose products are in registers together

// What the queries of a row are to one KV head, in vectors of LANES queries of one query head each.
struct Packed {
  float *numbers, *units, *totals;  // [vectors, dim, LANES] whole numbers; what 1 stands for and their sum, [vectors, LANES]
  int8_t* bytes;                    // [vectors, dim / 4, LANES, 4], the same numbers
  float* centre;                    // of the block that is scored, [dim], then scales of its tokens
  uint8_t* bits;                    // of the block that is scored, [block_size, dim]
  float* logits;                    // [blocks, vectors, LANES], in base 2
};

// Rounds queries to 127 steps each way. Lanes without a query have the last one.
void pack(const float* query, int64_t count, int64_t padded, int64_t group, int64_t dim, const Packed& p) {
  for (int64_t at = 0; at < group * padded; ++at) {
    const int64_t token = at % padded < count ? at % padded : count - 1, lane = at % LANES;
    const float* own = query + (token * group + at / padded) * 2 * dim;
    float *numbers = p.numbers + at / LANES * dim * LANES + lane, largest = 0, all = 0;
    for (int64_t d = 0; d < dim; ++d) largest = __builtin_fmaxf(largest, __builtin_fabsf(own[d]));
    for (int64_t d = 0; d < dim; ++d) {
      const float number = largest > 0 ? __builtin_rintf(own[d] * (127 / largest)) : 0;
      numbers[d * LANES] = number;
      p.bytes[(at / LANES * dim / 4 + d / 4) * LANES * 4 + lane * 4 + d % 4] = (int8_t)number;
      all += number;
    }
    p.units[at] = largest / 127;
    p.totals[at] = all;
  }
}

// Makes floats and bits of what stands for a block. `bytes` is scratch for a byte of each dimension.
void unpack(const uint16_t* index, int64_t dim, int64_t block_size, const Packed& p, uint8_t* bytes) {
  for (int64_t i = 0; i < dim + block_size; i += LANES) store(p.centre + i, widen((const Bf16*)index + i));
  for (int64_t t = 0; t < block_size; t += 8) {
    const uint16_t* words = index + dim + block_size + t / 16 * dim;
    for (int64_t d = 0; d < dim; d += LANES) store_bytes(bytes + d, load<HalfVec>(words + d) >> t % 16 & 0xff);
    for (int64_t i = 0; i < 8; ++i)
      for (int64_t d = 0; d < dim; d += 4 * LANES)  // what is written after `dim` belongs to later tokens
        store((float*)(p.bits + (t + i) * dim + d), (Vec)(load<WordVec>(bytes + d) >> i & 0x01010101));
  }
}

// The largest logits that tokens of a block may have, of V vectors of queries.
template <int V>
void peak_logits(const Packed& p, int64_t first, int64_t dim, int64_t block_size, float soft_cap, float* logits) {
  constexpr int kChains = 4;  // of sums that do not wait for one another
  Vec base[V][kChains] = {}, peak[V];
  const float* numbers = p.numbers + first * dim * LANES;
  for (int64_t d = 0; d < dim; d += kChains)
    for (int i = 0; i < kChains; ++i) {
      const Vec its = splat(p.centre[d + i]);
      for (int v = 0; v < V; ++v) base[v][i] += load<Vec>(numbers + (v * dim + d + i) * LANES) * its;
    }
  for (int v = 0; v < V; ++v) peak[v] = splat(-1e30f);
  for (int64_t t = 0; t < block_size; t += kTokens) {
    Sums sum[V][kTokens] = {};
    for (int64_t d = 0; d < dim; d += 4) {
      WordVec own[V];
      for (int v = 0; v < V; ++v) own[v] = load<WordVec>(p.bytes + ((first + v) * dim + d) * LANES);
#pragma GCC unroll 8
      for (int i = 0; i < kTokens; ++i) {
        const WordVec bits = WordVec{} + load<uint32_t>(p.bits + (t + i) * dim + d);
        for (int v = 0; v < V; ++v) sum[v][i] = add_products(sum[v][i], bits, own[v]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kTokens; ++i) {
      const Vec scale = splat(p.centre[dim + t + i]);
      for (int v = 0; v < V; ++v) {
        const Vec set = __builtin_convertvector(total(sum[v][i]), Vec);
        peak[v] = max(peak[v], scale * (2 * set - load<Vec>(p.totals + (first + v) * LANES)));
      }
    }
  }
  for (int v = 0; v < V; ++v) {
    Vec x = peak[v] + ((base[v][0] + base[v][1]) + (base[v][2] + base[v][3]));
    x *= load<Vec>(p.units + (first + v) * LANES);
    if (soft_cap > 0) x = soft_capped(x, soft_cap);
    store(logits + v * LANES, x * kLog2e);
  }
}

// Adds the shares of attention that queries of one KV head may pay to each block, if the best of its tokens stood for it.
void tile_shares(const float* query, int64_t count, int64_t group, int64_t dim, const ReachIndex& index, int64_t head,
                 float soft_cap, const float* sinks, int64_t sink_stride, const int32_t* places, int64_t num,
                 float* scratch, float* shares) {
  const int64_t padded = padded_queries(count), lines = padded / LANES, vectors = group * lines;
  Packed p;
  p.numbers = scratch + (0 - (uintptr_t)scratch) % 64 / 4;
  p.units = p.numbers + vectors * dim * LANES;
  p.totals = p.units + vectors * LANES;
  p.logits = p.totals + vectors * LANES;
  p.bytes = (int8_t*)(p.logits + num * vectors * LANES);
  p.centre = (float*)(p.bytes + vectors * dim * LANES);
  p.bits = (uint8_t*)(p.centre + dim + index.block_size);
  uint8_t* bytes = p.bits + index.block_size * dim + 4 * LANES;
  pack(query, count, padded, group, dim, p);
  for (int64_t n = 0; n < num; ++n) {
    const uint16_t* own = (const uint16_t*)index.data + (places[n] * index.kv_heads + head) * index.width;
    unpack(own, dim, index.block_size, p, bytes);
    float* logits = p.logits + n * vectors * LANES;
    int64_t v = 0;
    for (; v + kVectors <= vectors; v += kVectors)
      peak_logits<kVectors>(p, v, dim, index.block_size, soft_cap, logits + v * LANES);
    for (; v < vectors; ++v) peak_logits<1>(p, v, dim, index.block_size, soft_cap, logits + v * LANES);
  }
  for (int64_t v = 0; v < vectors; ++v) {
    Vec sink = splat(-1e30f);
    for (int64_t i = 0; sinks && i < LANES; ++i) {
      const int64_t token = v % lines * LANES + i;
      sink[i] = sinks[(token < count ? token : count - 1) * sink_stride + v / lines] * kLog2e;
    }
    Vec peak = sink;
    for (int64_t n = 0; n < num; ++n) peak = max(peak, load<Vec>(p.logits + (n * vectors + v) * LANES));
    Vec sum = exp2(sink - peak);
    for (int64_t n = 0; n < num; ++n) {
      float* own = p.logits + (n * vectors + v) * LANES;
      const Vec share = exp2(load<Vec>(own) - peak);
      store(own, share);
      sum += share;
    }
    for (int64_t n = 0; n < num; ++n) {
      float* out = shares + n * padded + v % lines * LANES;
      store(out, load<Vec>(out) + load<Vec>(p.logits + (n * vectors + v) * LANES) / sum);
    }
  }
}

void block_logits(const float* query, int64_t count, int64_t dim, const ReachIndex& index,
                  int64_t head, float soft_cap, const int32_t* places, int64_t num, float* logits,
                  int64_t out_stride) {
  const int64_t stride = index.kv_heads * index.width, first = head * index.width;
  if (index.signs) {
    for (int64_t q = 0; q < count; q += kQueries)
      sign_logits(query + 2 * q * dim, count - q < kQueries ? count - q : kQueries, dim,
                  (const uint16_t*)index.data + first, stride, index.block_size, soft_cap, places,
                  num, logits + q * out_stride, out_stride);
    return;
  }
  if (index.type == Type::f32)
    box_logits(query, count, dim, (const float*)index.data + first, stride, places, num, logits,
               out_stride);
  else if (index.type == Type::bf16)
    box_logits(query, count, dim, (const Bf16*)index.data + first, stride, places, num, logits,
               out_stride);
  else
    box_logits(query, count, dim, (const F16*)index.data + first, stride, places, num, logits,
               out_stride);
}

}  // namespace

constexpr ReachKernel reach_kernel = {block_logits, tile_shares};

}  // namespace vllm_evict::ISA

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
}  // namespace vllm_evict::ISA

// Logits of blocks: products of queries with boxes, with signs of keys, or with keys at two bits a number. A source file for each instruction set
// includes it, after isa.h (see mass_kernel.h).

#include "reach.h"
#include "reach_codes.h"
#include "vectors.h"

namespace vllm_evict::ISA {
namespace {

// The log (base 2) of the sum of exp(logit) over the boxes of each block: of the first `width` numbers.
template <class T>
void box_logits(const float* query, int64_t count, int64_t dim, const T* boxes, int64_t stride, int64_t width,
                float soft_cap, const int32_t* places, int64_t num, float* logits, int64_t out_stride) {
  const int64_t size = 2 * dim;
  for (int64_t n = 0; n < num; ++n)
    for (int64_t q = 0; q < count; ++q) {
      const float* own = query + q * size;
      float top = 0, total = 0;
      for (int64_t at = 0; at < width; at += size) {
        const T* box = boxes + places[n] * stride + at;
        Vec sum{};
        for (int64_t d = 0; d < size; d += LANES) sum += load<Vec>(own + d) * widen(box + d);
        const float x = kLog2e * capped(splat(sum_of(sum)), soft_cap)[0], higher = at && top > x ? top : x;
        total = at ? total * __builtin_exp2f(top - higher) + __builtin_exp2f(x - higher) : 1;
        top = higher;
      }
      logits[q * out_stride + n] = width > size ? top + __builtin_log2f(total) : top;
    }
}

// The upper half of floats, rounded to even.
inline HalfVec to_bf16(Vec x) {
  const WordVec bits = (WordVec)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return __builtin_convertvector(x == x ? rounded : WordVec{} + 0x7fc0, HalfVec);
}

void key_signs(const float* keys, int64_t dim, int64_t block_size, uint16_t* index) {
  uint16_t *scales = index + dim, *words = scales + block_size;
  for (int64_t d = 0; d < dim; d += LANES) {
    Vec sum{};
    for (int64_t t = 0; t < block_size; ++t) sum += load<Vec>(keys + t * dim + d);
    store(index + d, to_bf16(sum / splat(block_size)));
  }
  for (int64_t i = 0; i < block_size / 16 * dim; ++i) words[i] = 0;
  for (int64_t t = 0; t < block_size; ++t) {
    Vec total{};
    for (int64_t d = 0; d < dim; d += LANES) {
      const Vec rest = load<Vec>(keys + t * dim + d) - widen((const Bf16*)(index + d));
      const WordVec above = (WordVec)(rest >= 0) & 1u << t % 16;
      total += rest < 0 ? -rest : rest;
      uint16_t* own = words + t / 16 * dim + d;
      store(own, load<HalfVec>(own) | __builtin_convertvector(above, HalfVec));
    }
    scales[t] = to_bf16(splat(sum_of(total) / dim))[0];
  }
}

constexpr int64_t kQueries = 4;  // that read the signs together

// Calls write(at, sums) with the 16 sums that each four numbers of a query have with either sign, LANES at once, and
// where they belong in [dim / 4, 16].
template <class Write>
inline void tabulate(const float* query, int64_t dim, Write write) {
  for (int64_t d = 0; d < dim; d += 4)
    for (int64_t first = 0; first < 16; first += LANES) {
      const WordVec bits = (WordVec)lane_numbers(Lanes{}) + (uint32_t)first;
      Vec sum{};
      for (int64_t j = 0; j < 4; ++j) sum += (bits >> j & 1) != 0 ? splat(query[d + j]) : splat(-query[d + j]);
      write(4 * d + first, sum);
    }
}

// The log (base 2) of the sum of exp(logit) over a block's tokens, for Q queries. A key is taken
// for its block's centre + its scale in the direction of its signs. A block has its centre [dim], the
// scales of its tokens, and for each 16 tokens and dimension a word with a bit for each token.
template <int Q>
void sign_logits(const float* query, int64_t dim, const uint16_t* index,
                 int64_t stride, int64_t block_size, float soft_cap, const int32_t* places,
                 int64_t num, float* tables, float* logits, int64_t out_stride) {
  const WordVec lane = (WordVec)lane_numbers(Lanes{});
  for (int q = 0; q < Q; ++q)
    tabulate(query + 2 * q * dim, dim, [&](int64_t at, Vec sums) { store(tables + 4 * q * dim + at, sums); });
  for (int64_t n = 0; n < num; ++n) {
    const uint16_t* centre = index + places[n] * stride;
    const uint16_t* scales = centre + dim;
    Vec base[Q], peak[Q], sum[Q];
    for (int q = 0; q < Q; ++q) {
      Vec product{};
      for (int64_t d = 0; d < dim; d += LANES)
        product += load<Vec>(query + 2 * q * dim + d) * widen((const Bf16*)(centre + d));
      base[q] = splat(sum_of(product));
      peak[q] = splat(-1e30f);
      sum[q] = Vec{};
    }
    for (int64_t t = 0; t < block_size; t += LANES) {
      const uint16_t* words = scales + block_size + t / 16 * dim;
      const WordVec token = lane + (uint32_t)(t % 16);
      Vec own[Q] = {};
      for (int64_t d = 0; d < dim; d += 4) {
        // Each bit of the first of two dimensions is 16 bits below that of the second one.
        const WordVec first = WordVec{} + load<uint32_t>(words + d), second = WordVec{} + load<uint32_t>(words + d + 2);
        const WordVec bits = (first >> token & 0x10001) | (second >> token & 0x10001) << 2;
        const WordVec of_sums = bits | bits >> 15;
        for (int q = 0; q < Q; ++q) own[q] += pick(tables + 4 * (q * dim + d), of_sums);
      }
      const Vec scale = widen((const Bf16*)(scales + t));
      for (int q = 0; q < Q; ++q) {
        Vec x = base[q] + scale * own[q];
        x = capped(x, soft_cap);
        x *= kLog2e;
        const Vec top = max(peak[q], x);
        sum[q] = sum[q] * exp2(peak[q] - top) + exp2(x - top);
        peak[q] = top;
      }
    }
    for (int q = 0; q < Q; ++q) {
      const float top = largest_of(peak[q]);
      const float all = sum_of(sum[q] * exp2(peak[q] - top));
      logits[q * out_stride + n] = top + __builtin_log2f(all);
    }
  }
}

// ---- Many queries of one KV head: each byte of a vector is a block

constexpr int64_t kPanel = 4 * LANES;         // blocks that are scored together
constexpr int kTokens = LANES == 16 ? 4 : 2;  // of each, whose sums are in registers together

// What stands for kPanel blocks. Byte 4 * i + k of a vector is of block k * LANES + i.
struct Panel {
  float *centres, *largest;  // [dim, kPanel]; the largest scale of each block, [kPanel]
  // For each token its scales, of even bytes, then of odd ones, in words of 16 bits of which 32767 is the largest; and
  // for each four dimensions a vector with their bits.
  uint32_t* tokens;
  int64_t token_words;

  Panel(float* at, int64_t dim) : centres(at), largest(at + dim * kPanel), tokens((uint32_t*)largest + kPanel) {
    token_words = (2 + dim / 4) * LANES;
  }
};

int64_t panel_floats(int64_t dim, int64_t block_size) {
  return (dim + 1) * kPanel + block_size * (2 + dim / 4) * LANES;
}

// Packs one KV head of blocks at places[0 ... num). The last one stands where a panel has more.
void pack(const ReachIndex& index, int64_t head, int64_t dim, const int32_t* places, int64_t num, float* panel) {
  const uint16_t* own[kPanel];
  for (int64_t n = 0; n < kPanel; ++n)
    own[n] = (const uint16_t*)index.data + (places[n < num ? n : num - 1] * index.kv_heads + head) * index.width;
  const auto words = [&](int64_t k, int64_t at) {
    WordVec its;
    for (int i = 0; i < LANES; ++i) its[i] = own[k * LANES + i][at];
    return its;
  };
  const Panel p(panel, dim);
  Vec steps[4] = {};
  for (int64_t k = 0; k < 4; ++k) {
    for (int64_t d = 0; d < dim; ++d) store(p.centres + d * kPanel + k * LANES, (Vec)(words(k, d) << 16));
    for (int64_t t = 0; t < index.block_size; ++t) steps[k] = max(steps[k], (Vec)(words(k, dim + t) << 16));
    store(p.largest + k * LANES, steps[k]);
    steps[k] = steps[k] > 0 ? 32767 / steps[k] : Vec{};
  }
  for (int64_t t = 0; t < index.block_size; ++t) {
    WordVec scales[2] = {};
    for (int64_t k = 0; k < 4; ++k) {
      const Vec number = (Vec)(words(k, dim + t) << 16) * steps[k] + 0.5f;
      scales[k % 2] |= (WordVec)__builtin_convertvector(number, IntVec) << k / 2 * 16;
    }
    for (int64_t i = 0; i < 2; ++i) store(p.tokens + t * p.token_words + i * LANES, scales[i]);
  }
  for (int64_t t = 0; t < index.block_size; t += 16)
    for (int64_t d = 0; d < dim; d += 4) {
      WordVec bits[16] = {};
      for (int64_t k = 0; k < 4; ++k)
        for (int64_t j = 0; j < 4; ++j) {
          const WordVec its = words(k, dim + index.block_size + t / 16 * dim + d + j);
          for (int64_t i = 0; i < 16; ++i) bits[i] |= (its >> i & 1) << (8 * k + j);
        }
      for (int64_t i = 0; i < 16; ++i) store(p.tokens + (t + i) * p.token_words + (2 + d / 4) * LANES, bits[i]);
    }
}

// Rounds the sums of a query to steps. Returns what a step is.
float tabulate_bytes(const float* query, int64_t dim, int8_t* tables) {
  float all = 0;
  for (int64_t d = 0; d < dim; ++d) all += __builtin_fabsf(query[d]);
  const float steps = tile_steps(dim), of_one = all > 0 ? steps / all : 0;
  tabulate(query, dim, [&](int64_t at, Vec sums) {
    const WordVec whole = (WordVec)(sums * of_one + kWhole);
    for (int i = 0; i < LANES; ++i) tables[at + i] = (int8_t)whole[i];
  });
  return all / steps;
}

// The largest logits, in base 2, that tokens of a panel's blocks may have, of kQueries queries.
void peak_logits(const float* query, const float* units, const int8_t* tables, const Panel& p, int64_t dim,
                 int64_t block_size, float soft_cap, float* logits, int64_t stride) {
  PairVec peak[kQueries][2];  // of even bytes, and of odd ones
  for (auto& its : peak) its[0] = its[1] = PairVec{} - 0x7fff;
  for (int64_t t = 0; t < block_size; t += kTokens) {
    const uint32_t* tokens = p.tokens + t * p.token_words;
    CharVec sum[kQueries][kTokens] = {};
    for (int64_t d = 0; d < dim; d += 4) {
      CharVec bits[kTokens];
      for (int i = 0; i < kTokens; ++i) bits[i] = load<CharVec>(tokens + i * p.token_words + (2 + d / 4) * LANES);
#pragma GCC unroll 4
      for (int q = 0; q < kQueries; ++q) {
        const Table table(tables + 4 * (q * dim + d));
#pragma GCC unroll 4
        for (int i = 0; i < kTokens; ++i) sum[q][i] += table[bits[i]];
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kTokens; ++i) {
      const PairVec even = load<PairVec>(tokens + i * p.token_words);
      const PairVec odd = load<PairVec>(tokens + i * p.token_words + LANES);
#pragma GCC unroll 4
      for (int q = 0; q < kQueries; ++q) {
        peak[q][0] = max(peak[q][0], multiply_round((PairVec)sum[q][i] << 8, even));
        peak[q][1] = max(peak[q][1], multiply_round((PairVec)sum[q][i] & (int16_t)0xff00, odd));
      }
    }
  }
  Vec base[kQueries][4] = {};
  for (int64_t d = 0; d < dim; ++d) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const Vec centre = load<Vec>(p.centres + d * kPanel + k * LANES);
#pragma GCC unroll 4
      for (int q = 0; q < kQueries; ++q) base[q][k] += splat(query[2 * q * dim + d]) * centre;
    }
  }
  for (int q = 0; q < kQueries; ++q)
    for (int k = 0; k < 4; ++k) {
      const IntVec both = (IntVec)peak[q][k % 2], its = k < 2 ? both << 16 >> 16 : both >> 16;
      const Vec unit = load<Vec>(p.largest + k * LANES) * (units[q] * (128.f / 32767));
      Vec x = base[q][k] + __builtin_convertvector(its, Vec) * unit;
      x = capped(x, soft_cap);
      store(logits + q * stride + k * LANES, x * kLog2e);
    }
}

// See `Shares`. The logits behind `num` may be anything.
void to_shares(float* logits, int64_t num, int64_t padded, float sink) {
  const Vec none = splat(__builtin_nanf(""));
  for (int64_t n = num; n < padded; ++n) logits[n] = none[0];
  Vec peak = splat(sink * kLog2e), sum{};
  for (int64_t n = 0; n < padded; n += LANES) {
    const Vec x = load<Vec>(logits + n);
    peak = x - x == 0 ? max(x, peak) : peak;
  }
  const float top = largest_of(peak);
  for (int64_t n = 0; n < padded; n += LANES) {
    const Vec x = load<Vec>(logits + n), share = exp2(x - top);
    const IntVec known = x - x == 0;
    store(logits + n, known ? share : none);
    sum += known ? share : Vec{};
  }
  const float unit = 1 / (sum_of(sum) + exp2(splat(sink * kLog2e - top))[0]);
  for (int64_t n = 0; n < padded; n += LANES) store(logits + n, load<Vec>(logits + n) * unit);
}

// Adds the shares of attention that queries of one KV head may pay to blocks, if the best of its tokens stood for each.
void tile_shares(const float* query, int64_t count, int64_t group, int64_t dim, int64_t block_size, float soft_cap,
                 const float* sinks, int64_t sink_stride, const float* panels, int64_t num, float* scratch,
                 float* shares) {
  const int64_t total = count * group, padded = (num + kPanel - 1) / kPanel * kPanel;
  float *logits = scratch, *units = logits + total * padded;
  int8_t* tables = (int8_t*)(units + total);
  for (int64_t q = 0; q < total; ++q) units[q] = tabulate_bytes(query + 2 * q * dim, dim, tables + 4 * q * dim);
  for (int64_t n = 0; n < num; n += kPanel) {
    const Panel p((float*)panels + n / kPanel * panel_floats(dim, block_size), dim);
    for (int64_t i = 0; i < total; i += kQueries) {
      const int64_t q = i + kQueries < total ? i : total - kQueries;
      peak_logits(query + 2 * q * dim, units + q, tables + 4 * q * dim, p, dim, block_size, soft_cap,
                  logits + q * padded + n, padded);
    }
  }
  for (int64_t q = 0; q < total; ++q) {
    float *own = logits + q * padded, *to = shares + q / group * padded;
    to_shares(own, num, padded, sinks ? sinks[q / group * sink_stride + q % group] : -__builtin_inff());
    for (int64_t n = 0; n < padded; n += LANES) store(to + n, load<Vec>(to + n) + load<Vec>(own + n));
  }
}

void block_logits(const float* query, int64_t count, int64_t dim, const ReachIndex& index,
                  int64_t head, float soft_cap, const int32_t* places, int64_t num, float* scratch,
                  float* logits, int64_t out_stride) {
  const int64_t stride = index.kv_heads * index.width, first = head * index.width;
  if (index.kind == Kind::codes) {
    const uint8_t* codes = (const uint8_t*)index.data + first;
    for (int64_t q = 0, some; q < count; q += some) {
      some = count - q < 4 ? count - q : 4;
      (some == 1 ? code_logits<1> : some == 2 ? code_logits<2> : some == 3 ? code_logits<3> : code_logits<4>)(
          query + 2 * q * dim, dim, codes, stride, index.block_size, soft_cap, places, num, scratch,
          logits + q * out_stride, out_stride);
    }
    return;
  }
  if (index.kind == Kind::signs) {
    for (int64_t q = 0, some; q < count; q += some) {
      some = count - q < 2 ? 1 : count - q < kQueries ? 2 : kQueries;
      (some == 1 ? sign_logits<1> : some == 2 ? sign_logits<2> : sign_logits<kQueries>)(
          query + 2 * q * dim, dim, (const uint16_t*)index.data + first, stride, index.block_size, soft_cap, places,
          num, scratch, logits + q * out_stride, out_stride);
    }
    return;
  }
  if (index.type == Type::f32)
    box_logits(query, count, dim, (const float*)index.data + first, stride, index.width, soft_cap, places, num,
               logits, out_stride);
  else if (index.type == Type::bf16)
    box_logits(query, count, dim, (const Bf16*)index.data + first, stride, index.width, soft_cap, places, num,
               logits, out_stride);
  else
    box_logits(query, count, dim, (const F16*)index.data + first, stride, index.width, soft_cap, places, num,
               logits, out_stride);
}

}  // namespace

constexpr ReachKernel reach_kernel = {block_logits, to_shares, key_signs, key_codes, kPanel, panel_floats, pack, tile_shares};

}  // namespace vllm_evict::ISA

// Keys at two bits a number, and products of queries with them (compute/kernels/codes.py has the layout).
// reach_kernel.h includes it.

#pragma once

#include "reach.h"
#include "vectors.h"

namespace vllm_evict::ISA {
namespace {

// Writes one group of keys [tokens, dim]. `middles` and `steps`: floats [dim].
void pack_group(const float* keys, int64_t dim, int64_t tokens, uint8_t* to, float* middles, float* steps) {
  Vec widest{}, farthest{}, finite{};
  for (int64_t d = 0; d < dim; d += LANES) {
    Vec least = load<Vec>(keys + d), most = least;
    for (int64_t t = 0; t < tokens; ++t) {
      const Vec key = load<Vec>(keys + t * dim + d);
      least = key < least ? key : least;
      most = key > most ? key : most;
      finite += key - key;
    }
    const Vec middle = least * 0.5f + most * 0.5f, step = (most - least) / 3;
    store(middles + d, middle);
    store(steps + d, step);
    farthest = max(farthest, middle < 0 ? -middle : middle);
    widest = max(widest, step);
  }
  float units[2] = {largest_of(farthest) / 127, largest_of(widest) / 255};
  const bool known = sum_of(finite) == 0 && units[0] - units[0] + units[1] - units[1] == 0;
  if (!known) {
    __builtin_memset(to, 0, code_bytes(tokens, dim) - 8);
    units[0] = units[1] = __builtin_nanf("");
  }
  uint8_t *of_middles = to + tokens * dim / 4, *of_steps = of_middles + dim;
  __builtin_memcpy(of_steps + dim, units, 8);
  if (!known) return;
  for (int64_t d = 0; d < dim; ++d) {
    const float middle = units[0] > 0 ? __builtin_rintf(middles[d] / units[0]) : 0;
    const float step = units[1] > 0 ? __builtin_ceilf(steps[d] / units[1]) : 0;
    of_middles[d] = (uint8_t)(int8_t)middle;
    of_steps[d] = (uint8_t)(step < 255 ? step : 255);
    middles[d] = middle * units[0];
    steps[d] = of_steps[d] * units[1];
  }
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t first = 0; first < dim; first += 16) {
      uint8_t codes[16];
      for (int64_t d = 0; d < 16; d += LANES) {
        const Vec step = load<Vec>(steps + first + d), rest = load<Vec>(keys + t * dim + first + d) -
                                                             load<Vec>(middles + first + d);
        Vec code = step > 0 ? rest / step + 1.5f : Vec{};
        code = max(code, Vec{});
        store(codes + d, low_bytes((code < 3 ? code : splat(3)) + kWhole));
      }
      uint32_t fours[4];
      __builtin_memcpy(fours, codes, 16);
      const uint32_t word = fours[0] | fours[1] << 2 | fours[2] << 4 | fours[3] << 6;
      __builtin_memcpy(to + (t / 16 * dim + first) * 4 + t % 16 * 4, &word, 4);
    }
}

void key_codes(const float* keys, int64_t dim, int64_t block_size, uint8_t* index) {
  float scratch[2 * dim];
  for (int64_t t = 0; t < block_size; t += kGroup) {
    const int64_t tokens = block_size - t < kGroup ? block_size - t : kGroup;
    pack_group(keys + t * dim, dim, tokens, index, scratch, scratch + dim);
    index += code_bytes(tokens, dim);
  }
}

// A logit under a soft cap, if there is one. NaN for infinite ones.
inline Vec capped(Vec x, float soft_cap) {
  return soft_cap > 0 ? soft_capped(x, soft_cap) + (x - x) : x;
}

// What a query is to a group of tokens: a logit is base + unit * (sum of weights and codes).
struct Weighed {
  float base, unit;
};

// Rounds what the numbers of Q queries are for the codes of a group to steps of a 127th of the largest of each.
// `floats` and `weights`: [Q, dim].
template <int Q>
inline void weigh(const float* query, int64_t dim, const int8_t* middles, const uint8_t* steps, const float* units,
                  float* floats, int8_t* weights, Weighed* its) {
  Vec base[Q] = {}, top[Q] = {};
  for (int64_t d = 0; d < dim; d += LANES) {
    const Vec middle = of_bytes(middles + d), step = of_bytes(steps + d);
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i) {
      const Vec q = load<Vec>(query + 2 * i * dim + d), weight = q * step;
      base[i] += q * middle;
      store(floats + i * dim + d, weight);
      top[i] = max((Vec)((WordVec)weight & 0x7fffffffu), top[i]);
    }
  }
  Vec all[Q] = {}, of_one[Q];
  for (int i = 0; i < Q; ++i) {
    const float most = largest_of(top[i]);
    its[i].unit = most / 127 * units[1];
    of_one[i] = splat(most > 0 ? 127 / most : 0);
  }
  for (int64_t d = 0; d < dim; d += LANES)
#pragma GCC unroll 4
    for (int i = 0; i < Q; ++i) {
      const Vec whole = load<Vec>(floats + i * dim + d) * of_one[i] + kWhole;
      all[i] += whole - kWhole;
      store(weights + i * dim + d, low_bytes(whole));
    }
  for (int i = 0; i < Q; ++i) its[i].base = sum_of(base[i] * units[0] - all[i] * (1.5f * its[i].unit));
}

// Adds products of Q queries' weights with the codes of V * LANES tokens, from `line` on: sums[query][vector].
template <int Q, int V>
inline void add_products(const uint8_t* line, int64_t dim, const int8_t* weights, IntVec (*sums)[V]) {
  for (int64_t d = 0; d < dim; d += 16, line += 64) {
    WordVec codes[V];
    for (int v = 0; v < V; ++v) codes[v] = load<WordVec>(line + v * LANES / 16 * dim * 4 + v * LANES % 16 * 4);
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p)
#pragma GCC unroll 4
      for (int q = 0; q < Q; ++q) {
        const WordVec weight = WordVec{} + load<uint32_t>(weights + q * dim + d + 4 * p);
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) sums[q][v] = dot_bytes(sums[q][v], codes[v] >> 2 * p & 0x03030303u, weight);
      }
  }
}

// Adds exp(logit) of V * LANES tokens to the sums of Q queries, each relative to its peak.
template <int Q, int V>
inline void add_tokens(const uint8_t* line, int64_t dim, const int8_t* weights, const Weighed* its, float soft_cap,
                       Vec* peak, Vec* total) {
  IntVec sums[Q][V] = {};
  add_products<Q, V>(line, dim, weights, sums);
  for (int q = 0; q < Q; ++q) {
    Vec x[V], top = peak[q];
    for (int v = 0; v < V; ++v) {
      x[v] = splat(its[q].base) + splat(its[q].unit) * __builtin_convertvector(sums[q][v], Vec);
      x[v] = capped(x[v], soft_cap) * kLog2e;
      top = max(top, x[v]);
    }
    total[q] *= exp2(peak[q] - top);
    for (int v = 0; v < V; ++v) total[q] += exp2(x[v] - top);
    peak[q] = top;
  }
}

// The log (base 2) of the sum of exp(logit) over the tokens of each block, for Q queries. `scratch`: [Q, dim] floats, and
// as many bytes.
template <int Q>
void code_logits(const float* query, int64_t dim, const uint8_t* index, int64_t stride, int64_t block_size,
                 float soft_cap, const int32_t* places, int64_t num, float* scratch, float* logits,
                 int64_t out_stride) {
  int8_t* weights = (int8_t*)(scratch + Q * dim);
  for (int64_t n = 0; n < num; ++n) {
    const uint8_t* at = index + places[n] * stride;
    Vec peak[Q], total[Q];
    for (int q = 0; q < Q; ++q) peak[q] = splat(-1e30f), total[q] = Vec{};
    for (int64_t t = 0, tokens; t < block_size; t += tokens) {
      tokens = block_size - t < kGroup ? block_size - t : kGroup;
      const uint8_t *middles = at + tokens * dim / 4, *steps = middles + dim;
      float units[2];
      __builtin_memcpy(units, steps + dim, 8);
      Weighed its[Q];
      weigh<Q>(query, dim, (const int8_t*)middles, steps, units, scratch, weights, its);
      for (int64_t i = 0; i < tokens; i += 2 * LANES) {
        const uint8_t* line = at + i / 16 * dim * 4 + i % 16 * 4;
        if (tokens - i < 2 * LANES)
          add_tokens<Q, 1>(line, dim, weights, its, soft_cap, peak, total);
        else
          add_tokens<Q, 2>(line, dim, weights, its, soft_cap, peak, total);
      }
      at += code_bytes(tokens, dim);
    }
    for (int q = 0; q < Q; ++q) {
      const float top = largest_of(peak[q]);
      logits[q * out_stride + n] = top + __builtin_log2f(sum_of(total[q] * exp2(peak[q] - top)));
    }
  }
}

}  // namespace
}  // namespace vllm_evict::ISA

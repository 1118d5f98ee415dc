// Kernels of split-KV paged decode attention with the mass of each block. docs/kernels.md has the design.
#pragma once

#include "decode_mass.h"
#ifdef __CUDACC__
#include "ptx.cuh"
#else
#include <emulator.h>  // tests/harness/cuda: the same functions on a CPU
#endif

namespace vllm_evict {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kChunk = 16;     // tokens of one warp's matrix products, all of one block
constexpr int kConsumers = 4;  // warps that compute
constexpr int kProducers = 2;  // warps that copy; divides kConsumers, so that one warp fills a slot
constexpr int kThreads = (kConsumers + kProducers) * kLanes;
constexpr int kHeadTile = 8;  // query heads of one matrix product
// Sizes of the second launch. Its loads depend only on statistics, so many are in flight at once.
constexpr int kCombineWarps = 4;
constexpr int kCombineThreads = kCombineWarps * kLanes;
constexpr int kSums = 4 * kCombineThreads;       // numbers of an output, or of mass, in its threads
constexpr int kLaneBlocks = kSums / kCombineThreads;  // blocks of a lane
constexpr int kMassBlocks = kLaneBlocks * kLanes;
constexpr int kMembers = 8;  // query heads of a warp at once

// Shared memory of `attend`: two barriers for each slot, then a ring of slots of one chunk each. A row is a token's
// key, its value and 16 bytes of padding. The padding shifts rows by four banks, so that ldmatrix has no conflicts.
template <int D>
struct Ring {
  static constexpr int row = 4 * D + 16;
  static constexpr int value = 2 * D;  // offset in a row
  static constexpr int slot = kChunk * row;

  // The number of slots is a multiple of the warps that compute, so each slot belongs to one warp. A barrier tells a
  // phase only from the next one. If warps shared a slot, one could take the slot's first chunk for its second.
  int slots;
  unsigned char* memory;

  __device__ explicit Ring(const DecodeArgs& a)
      : slots(kConsumers * static_cast<int>(a.depth)), memory(dynamic_shared()) {}
  __device__ Barrier* full(int slot) const { return reinterpret_cast<Barrier*>(memory) + slot; }
  __device__ Barrier* empty(int slot) const { return full(slots + slot); }
  __device__ unsigned char* rows(int number) const { return memory + 2 * sizeof(Barrier) * slots + number * slot; }
};

// After all chunks the slots hold the results of the warps: outputs, maxima and sums.
template <int D, int kTiles>
struct Merge {
  static constexpr int heads = kTiles * kHeadTile;
  static constexpr int head = D + 4;  // floats; four lanes of a quad write four heads, in different banks
  static constexpr int warp = heads * head;
  static constexpr int bytes = 4 * kConsumers * (warp + 2 * heads);
};

template <int D, int kTiles>
int shared_bytes(int64_t depth) {
  const int slots = kConsumers * static_cast<int>(depth), ring = slots * Ring<D>::slot;
  return 2 * sizeof(Barrier) * slots + (ring > Merge<D, kTiles>::bytes ? ring : Merge<D, kTiles>::bytes);
}

// The work of one thread block: chunks first ... first + count - 1 of a request.
struct Split {
  int64_t n, row;
  int kv_head, split, len, first, count;
};

__device__ inline float max_over_rows(float x) {
#pragma unroll
  for (int other = 4; other < kLanes; other *= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, other));
  return x;
}

__device__ inline float sum_over_rows(float x) {
#pragma unroll
  for (int other = 4; other < kLanes; other *= 2) x += __shfl_xor_sync(kAllLanes, x, other);
  return x;
}

// Each of two warps copies every other chunk into the ring, as far ahead as there are slots.
template <int D, bool kBulk>
__device__ void produce(const DecodeArgs& a, const Split& s, const Ring<D>& ring) {
  using R = Ring<D>;
  const int lane = threadIdx.x % kLanes;
  const int first = threadIdx.x / kLanes - kConsumers;
  const int block_size = static_cast<int>(a.block_size);
  const int32_t* table = a.table + s.row * a.table_row;
  // 64 bits, since a cache has more than 2**31 elements.
  const char* keys = static_cast<const char*>(a.keys) + 2 * s.kv_head * a.key_head;
  const char* values = static_cast<const char*>(a.values) + 2 * s.kv_head * a.value_head;
  // If a token's value follows its key, one copy brings both.
  const bool joined = values == keys + 2 * D && a.key_block == a.value_block && a.key_token == a.value_token;

  // Each lane has the address of one of this warp's chunks from `start` on, and the page of the chunk 32 later, which
  // loads during the copies.
  const auto token_of = [&](int start) { return (s.first + start + lane * kProducers) * kChunk; };
  const auto page_of = [&](int start) {
    return start + lane * kProducers < s.count ? table[token_of(start) / block_size] : 0;
  };
  constexpr int round = kLanes * kProducers;
  int32_t next_page = page_of(first);
  long long key_offset = 0, value_offset = 0;
  int slot = first, parity = 1;  // parity of the phase before the first one, in which all slots are empty
  for (int chunk = first; chunk < s.count; chunk += kProducers) {
    const int known = chunk % round / kProducers;
    if (known == 0) {
      const int place = token_of(chunk) % block_size;
      key_offset = 2 * (next_page * a.key_block + place * a.key_token);
      value_offset = 2 * (next_page * a.value_block + place * a.value_token);
      next_page = page_of(chunk + round);
    }
    const char* key = keys + __shfl_sync(kAllLanes, key_offset, known);
    const char* value = values + __shfl_sync(kAllLanes, value_offset, known);
    const int valid = min(s.len - (s.first + chunk) * kChunk, kChunk);
    unsigned char* rows = ring.rows(slot);
    Barrier* full = ring.full(slot);
    barrier_wait(ring.empty(slot), parity);
    if constexpr (kBulk) {
      if (lane == 0) barrier_expect(full, valid * 4 * D);
      __syncwarp();
      const int row = lane % kChunk;
      if (row < valid) {
        if (lane < kChunk)
          copy_bulk(rows + row * R::row, key + 2 * row * a.key_token, joined ? 4 * D : 2 * D, full);
        else if (!joined)
          copy_bulk(rows + row * R::row + R::value, value + 2 * row * a.value_token, 2 * D, full);
      }
    } else {
      constexpr int pieces = 4 * D / 16;  // copies of a row
#pragma unroll
      for (int i = 0; i < kChunk * pieces / kLanes; ++i) {
        const int row = (i * kLanes + lane) / pieces, piece = (i * kLanes + lane) % pieces;
        const char* source = piece < pieces / 2 ? key + 2 * row * a.key_token + 16 * piece
                                                : value + 2 * row * a.value_token + 16 * (piece - pieces / 2);
        if (row < valid) copy_16(rows + row * R::row + 16 * piece, source);
      }
      arrive_with_copies(full);
    }
    if ((slot += kProducers) >= ring.slots) slot = first, parity ^= 1;
  }
}

// Each of four warps takes every fourth chunk, with a maximum, sums and outputs of its own. Keys are the rows of the
// first product, dimensions the rows of the second, and query heads the columns of both. Exponents have base 2.
template <class T, int D, int kTiles>
__device__ void consume(const DecodeArgs& a, const Split& s, const Ring<D>& ring) {
  using R = Ring<D>;
  using M = Merge<D, kTiles>;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, g = lane / 4, t = lane % 4;
  const int group = static_cast<int>(a.group);
  const int64_t token = a.starts[s.row];
  const float scale = static_cast<float>(a.scale);
  const bool has_mass = a.granules != nullptr && (a.weights == nullptr || a.weights[token] != 0.0f);
  float* granules = a.granules + (s.n * a.kv_heads + s.kv_head) * a.capacity * group;

  uint32_t q[kTiles][D / 16][2];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int head = tile * kHeadTile + g;
    const auto* row = static_cast<const uint16_t*>(a.query) + token * a.query_token +
                      (static_cast<int64_t>(s.kv_head) * group + head) * a.query_head + 2 * t;
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        q[tile][k][half] = head < group ? *reinterpret_cast<const uint32_t*>(row + 16 * k + 8 * half) : 0;
  }

  // For columns (query heads) 2t and 2t + 1. Sums are over this lane's tokens only.
  float top[kTiles][2], total[kTiles][2], out[kTiles][D / 16][4];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) top[tile][i] = -INFINITY, total[tile][i] = 0;
#pragma unroll
    for (int m = 0; m < D / 16; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[tile][m][i] = 0;
  }

  int slot = warp, parity = 0;
  for (int chunk = warp; chunk < s.count; chunk += kConsumers) {
    const unsigned char* rows = ring.rows(slot);
    barrier_wait(ring.full(slot), parity);

    float scores[kTiles][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t keys[4];
      load_matrices(keys, rows + lane % 16 * R::row + 32 * k + 16 * (lane / 16));
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) multiply(T{}, scores[tile], keys, q[tile][k]);
    }

    // Rows beyond the last token are not copied, so the slot may hold NaN there.
    const int valid = s.len - (s.first + chunk) * kChunk;
    uint32_t probs[kTiles][2];
    float kept[kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) p[i] = g + 8 * (i / 2) < valid ? scores[tile][i] * scale : -INFINITY;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float higher = fmaxf(top[tile][i], max_over_rows(fmaxf(p[i], p[i + 2])));
        kept[tile][i] = exp2_of(top[tile][i] - higher);
        p[i] = exp2_of(p[i] - higher);
        p[i + 2] = exp2_of(p[i + 2] - higher);
        total[tile][i] = total[tile][i] * kept[tile][i] + (p[i] + p[i + 2]);
        top[tile][i] = higher;
      }
      if (has_mass) {
        const int granule = s.first + chunk, head = tile * kHeadTile + 2 * t;
        const float sums[2] = {sum_over_rows(p[0] + p[2]), sum_over_rows(p[1] + p[3])};
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (g == i && head + i < group && granule < a.capacity)
            granules[static_cast<int64_t>(granule) * group + head + i] = top[tile][i] + log2_of(sums[i]);
      }
      probs[tile][0] = transpose(pack(T{}, p[0], p[1]));
      probs[tile][1] = transpose(pack(T{}, p[2], p[3]));
    }

    // Tokens 2t, 2t + 1, 2t + 8 and 2t + 9. Values beyond the last token are masked.
    uint32_t there[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      there[i] = (2 * t + 8 * i < valid ? 0xffffu : 0u) | (2 * t + 8 * i + 1 < valid ? 0xffff0000u : 0u);
#pragma unroll
    for (int m = 0; m < D / 16; ++m) {
      uint32_t values[4];
      load_transposed(values,
                      rows + R::value + (lane % 8 + lane / 16 * 8) * R::row + 32 * m + 16 * (lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] &= there[i / 2];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[tile][m][i] *= kept[tile][i % 2];
        multiply(T{}, out[tile][m], values, probs[tile]);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty(slot));
    if ((slot += kConsumers) >= ring.slots) slot = warp, parity ^= 1;
  }

  // All four warps have read their last chunk and no copy is in flight, so the slots are free.
  sync_some(1, kConsumers * kLanes);
  float* outs = reinterpret_cast<float*>(ring.rows(0));
  float* tops = outs + kConsumers * M::warp;
  float* totals = tops + kConsumers * M::heads;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = tile * kHeadTile + 2 * t + i;
      const float sum = sum_over_rows(total[tile][i]);
      if (g == 0) tops[warp * M::heads + head] = top[tile][i], totals[warp * M::heads + head] = sum;
    }
#pragma unroll
    for (int m = 0; m < D / 16; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        outs[warp * M::warp + (tile * kHeadTile + 2 * t + i % 2) * M::head + 16 * m + g + 8 * (i / 2)] =
            out[tile][m][i];
  }
  sync_some(1, kConsumers * kLanes);
  const int64_t first_head = (s.n * a.kv_heads + s.kv_head) * group;
  for (int i = threadIdx.x; i < group * D; i += kConsumers * kLanes) {
    const int head = i / D, dim = i % D;
    float highest = -INFINITY, sum = 0, value = 0;
    for (int w = 0; w < kConsumers; ++w) highest = fmaxf(highest, tops[w * M::heads + head]);
    for (int w = 0; w < kConsumers; ++w) {
      // A warp without a chunk has the maximum -inf. The first warp always has a chunk.
      const float factor = exp2_of(tops[w * M::heads + head] - highest);
      sum += factor * totals[w * M::heads + head];
      value += factor * outs[w * M::warp + head * M::head + dim];
    }
    const int64_t at = (first_head + head) * a.splits + s.split;
    a.partial[at * D + dim] = value;
    if (dim == 0) a.stats[2 * at] = highest, a.stats[2 * at + 1] = sum;
  }
}

// One thread block for each KV head, split and request.
template <class T, int D, int kTiles, bool kBulk>
__global__ void __launch_bounds__(kThreads, kTiles == 2 || D > 128 ? 2 : 3) attend(const __grid_constant__ DecodeArgs a) {
  if constexpr (kBulk && !kHasBulk) {
    stop();
    return;
  }
  Split s;
  s.kv_head = blockIdx.x;
  s.split = blockIdx.y;
  s.n = blockIdx.z;
  s.row = a.rows[s.n];
  if (s.row < 0) return;
  s.len = a.lens[s.row];
  const int chunks = (s.len + kChunk - 1) / kChunk, splits = static_cast<int>(a.splits);
  // Splits of equal size, with as many chunks for each warp.
  const int share = (chunks + splits * kConsumers - 1) / (splits * kConsumers) * kConsumers;
  s.first = s.split * share;
  s.count = min(share, chunks - s.first);
  if (s.count <= 0) {
    if (threadIdx.x < a.group) {
      float* stats = a.stats + 2 * (((s.n * a.kv_heads + s.kv_head) * a.group + threadIdx.x) * a.splits + s.split);
      stats[0] = -INFINITY, stats[1] = 0;
    }
    return;
  }
  const Ring<D> ring(a);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < ring.slots; ++slot) {
      barrier_init(ring.full(slot), kBulk ? 1 : kLanes);
      barrier_init(ring.empty(slot), 1);
    }
    barrier_init_done();
  }
  __syncthreads();
  if (threadIdx.x / kLanes >= kConsumers)
    produce<D, kBulk>(a, s, ring);
  else
    consume<T, D, kTiles>(a, s, ring);
}

// LSEs (log2) over all splits, of heads first, first + step, ... below `heads`, by a whole warp; -inf for a request
// without tokens. The last bits differ between lanes, so callers that need one number take lane 0's.
template <int kHeads>
__device__ void lse_of(float (&lse)[kHeads], const float* stats, int first, int step, int heads, int splits) {
  float top[kHeads], sum[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) top[i] = -INFINITY, sum[i] = 0;
  for (int split = threadIdx.x % kLanes; split < splits; split += kLanes) {
    float2 it[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first + i * step;
      it[i] = head < heads ? reinterpret_cast<const float2*>(stats)[head * splits + split] : float2{-INFINITY, 0};
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (it[i].y <= 0) continue;  // an empty split
      const float higher = fmaxf(top[i], it[i].x);
      sum[i] = sum[i] * exp2_of(top[i] - higher) + it[i].y * exp2_of(it[i].x - higher);
      top[i] = higher;
    }
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    float highest = top[i];
    for (int other = 1; other < kLanes; other *= 2)
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, other));
    float all = sum[i] != 0 ? sum[i] * exp2_of(top[i] - highest) : 0;
    for (int other = 1; other < kLanes; other *= 2) all += __shfl_xor_sync(kAllLanes, all, other);
    lse[i] = highest + log2_of(all);
  }
}

// Output and LSE of one head. Each group of threads adds up some splits, four dimensions in a thread.
template <class T>
__device__ void combine_output(const DecodeArgs& a, int64_t n, int64_t row, int head) {
  const int splits = static_cast<int>(a.splits), dims = static_cast<int>(a.head_dim), thread = threadIdx.x;
  const int64_t token = a.starts[row], first = n * a.kv_heads * a.group + head;
  const float* stats = a.stats + 2 * first * splits;
  float* sums = reinterpret_cast<float*>(dynamic_shared());
  float* factors = sums + kSums;
  float lse[1];
  lse_of(lse, stats, 0, 1, 1, splits);
  const float log = __shfl_sync(kAllLanes, lse[0], 0);
  for (int split = thread; split < splits; split += kCombineThreads)
    factors[split] = stats[2 * split + 1] != 0 ? exp2_of(stats[2 * split] - log) : 0;
  __syncthreads();
  const int wide = dims / 4, groups = kCombineThreads / wide, group = thread / wide, place = thread % wide;
  const auto* partial = reinterpret_cast<const float4*>(a.partial + first * splits * dims) + place;
  float4 sum = {0, 0, 0, 0};
#pragma unroll 4
  for (int split = group; split < splits; split += groups) {
    const float factor = factors[split];
    const float4 it = partial[static_cast<int64_t>(split) * wide];
    // An empty split has not written its scratch, which may hold NaN.
    sum.x += factor != 0 ? factor * it.x : 0;
    sum.y += factor != 0 ? factor * it.y : 0;
    sum.z += factor != 0 ? factor * it.z : 0;
    sum.w += factor != 0 ? factor * it.w : 0;
  }
  reinterpret_cast<float4*>(sums)[group * wide + place] = sum;
  __syncthreads();
  auto* output = static_cast<uint16_t*>(a.output) + token * a.output_token + head * a.output_head;
  for (int dim = thread; dim < dims; dim += kCombineThreads) {
    float value = 0;
    for (int from = 0; from < groups; ++from) value += sums[from * dims + dim];
    output[dim] = static_cast<uint16_t>(pack(T{}, value, 0.0f));
  }
  if (a.lse != nullptr && thread == 0) {
    constexpr float ln_2 = 0.6931471805599453f;
    a.lse[token * a.lse_token + head * a.lse_head] = log * ln_2;
  }
}

// Mass of kMassBlocks blocks for one head of `mass`: each warp adds up every fourth of its query heads.
__device__ inline void combine_mass(const DecodeArgs& a, int64_t n, int64_t row, int mass_head, int first) {
  const float weight = a.weights == nullptr ? 1.0f : a.weights[a.starts[row]];
  if (weight == 0.0f) return;
  const int splits = static_cast<int>(a.splits), group = static_cast<int>(a.group);
  const int parts = static_cast<int>(a.block_size) / kChunk;
  const int granules = (a.lens[row] + kChunk - 1) / kChunk;
  if (static_cast<int64_t>(first) * parts >= granules) return;
  const int heads = static_cast<int>(a.kv_heads) * group, members = heads / static_cast<int>(a.mass_heads);
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const float* stats = a.stats + 2 * (n * heads + mass_head * members) * splits;
  const float* held = a.granules + n * a.kv_heads * a.capacity * group;
  float sum[kLaneBlocks] = {};
  for (int member = warp; member < members; member += kMembers * kCombineWarps) {
    float lse[kMembers];
    lse_of(lse, stats, member, kCombineWarps, members, splits);
    for (int part = 0; part < parts; ++part) {
      float log[kLaneBlocks][kMembers];
#pragma unroll
      for (int i = 0; i < kMembers; ++i) {
        const int its = member + i * kCombineWarps, head = mass_head * members + its;
#pragma unroll
        for (int j = 0; j < kLaneBlocks; ++j) {
          const int block = first + j * kLanes + lane, granule = block * parts + part;
          const int64_t at = (head / group * a.capacity + granule) * group + head % group;
          log[j][i] = its < members && block < a.measured && granule < granules ? held[at] - lse[i] : -INFINITY;
        }
      }
#pragma unroll
      for (int i = 0; i < kMembers; ++i)
#pragma unroll
        for (int j = 0; j < kLaneBlocks; ++j) sum[j] += exp2_of(log[j][i]);
    }
  }
  float* sums = reinterpret_cast<float*>(dynamic_shared());
#pragma unroll
  for (int j = 0; j < kLaneBlocks; ++j) sums[warp * kMassBlocks + j * kLanes + lane] = sum[j];
  __syncthreads();
  for (int place = threadIdx.x; place < kMassBlocks; place += kCombineThreads) {
    const int block = first + place;
    if (block >= a.measured || block * parts >= granules) return;
    float all = 0;
    for (int from = 0; from < kCombineWarps; ++from) all += sums[from * kMassBlocks + place];
    a.mass[row * a.mass_row + mass_head * a.mass_head + block] += all * weight;
  }
}

// One thread block for each request and role. The first H roles write output and LSE of a head, the others the mass of
// some blocks.
template <class T>
__global__ void __launch_bounds__(kCombineThreads) combine(const __grid_constant__ DecodeArgs a) {
  const int64_t n = blockIdx.y, row = a.rows[n];
  if (row < 0) return;
  const int heads = static_cast<int>(a.kv_heads * a.group), role = static_cast<int>(blockIdx.x) - heads;
  if (role < 0) return combine_output<T>(a, n, row, role + heads);
  const int tiles = static_cast<int>((a.measured + kMassBlocks - 1) / kMassBlocks);
  combine_mass(a, n, row, role / tiles, role % tiles * kMassBlocks);
}

}  // namespace vllm_evict

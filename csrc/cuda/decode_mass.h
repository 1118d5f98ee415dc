// The interface between the launcher (decode_mass.cu) and its caller (vllm_evict/compute/kernels/decode_cuda.py, by
// ctypes). It does not use torch, so one build serves any version of torch.
#pragma once

#include <cstdint>

namespace vllm_evict {

// One call. Strides count elements. Every member has 8 bytes.
struct DecodeArgs {
  const void *query, *keys, *values;  // [T, H, D]; [num_blocks, Hkv, block_size, D] each
  const int32_t* table;               // [R, blocks]
  const int32_t* starts;              // [R + 1], offsets of requests in `query`
  const int32_t* lens;                // [R], resident tokens
  const int32_t* rows;                // [n], rows of the requests to decode; -1: padding
  const float* weights;               // [T], or null for ones
  float* partial;                     // [n, H, splits, D], outputs of splits, not normalised
  float* stats;                       // [n, H, splits, 2], maxima (log2) and sums of splits
  float* granules;  // [n, Hkv, capacity, group], log2 of sums of exponentials; null: no mass
  void* output;     // [T, H, D]
  float* lse;       // [T, H], or null
  float* mass;      // [R, mass_heads, >= measured], added to
  int64_t query_token, query_head;
  int64_t key_block, key_head, key_token, value_block, value_head, value_token;
  int64_t table_row, output_token, output_head, lse_token, lse_head, mass_row, mass_head;
  int64_t n, kv_heads, group, head_dim, block_size, splits;
  int64_t capacity;    // granules of a request in `granules`
  int64_t measured;    // blocks of a request in `mass`
  int64_t mass_heads;  // 1 or kv_heads
  int64_t depth;       // most chunks of 16 tokens in flight for each of four warps
  int64_t half;        // 0: bfloat16, 1: float16
  int64_t bulk;        // 0: cp.async (sm_80), 1: cp.async.bulk (sm_90)
  double scale;        // of scores, times log2(e)
};

}  // namespace vllm_evict

#define VLLM_EVICT_EXPORT __attribute__((visibility("default")))

extern "C" {
// Bytes of DecodeArgs, by which a caller detects another version.
VLLM_EVICT_EXPORT int64_t vllm_evict_decode_args_size();
// Bytes of shared memory of a thread block of the first launch; 0 if the shape is not supported.
VLLM_EVICT_EXPORT int64_t vllm_evict_decode_shared_bytes(int64_t head_dim, int64_t group, int64_t depth);
// Makes two launches on `stream`, without a wait. Returns 0, or an error for vllm_evict_error.
VLLM_EVICT_EXPORT int vllm_evict_decode_mass(const vllm_evict::DecodeArgs* args, void* stream);
VLLM_EVICT_EXPORT const char* vllm_evict_error(int code);
}

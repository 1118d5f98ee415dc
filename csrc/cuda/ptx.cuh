// Instructions without a name in CUDA C++, one function each. tests/harness/cuda/emulator.h has the same functions for a CPU,
// in terms of the contents of each lane. The emulator's tests cover all device code but this file.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace vllm_evict {

// Element types; tensors hold their bits.
struct Bf16 {};
struct Half {};

// A barrier in shared memory, by which an asynchronous copy signals its end.
using Barrier = uint64_t;

__device__ inline unsigned char* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char memory[];
  return memory;
}

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Whether this is compiled for GPUs with bulk copies.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kHasBulk = true;
#else
constexpr bool kHasBulk = false;
#endif

// Ends the kernel with an error.
__device__ inline void stop() { __trap(); }

// ---- matrices. A lane is g = lane / 4, t = lane % 4.

// Four 8 x 8 matrices of 16-bit elements. Lane l passes row l % 8 of matrix l / 8 (16 bytes, aligned) and
// gets elements 2t and 2t + 1 of row g of each.
__device__ inline void load_matrices(uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, but it gets elements g of rows 2t and 2t + 1.
__device__ inline void load_transposed(uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}

// An 8 x 8 matrix: in, elements 2t and 2t + 1 of row g; out, elements g of rows 2t and 2t + 1.
__device__ inline uint32_t transpose(uint32_t m) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(m));
  return out;
}

// c += a b. a is 16 x 16: a[0] has row g, columns 2t and 2t + 1; a[1] row g + 8; a[2], a[3] the same rows,
// columns + 8. b is 16 x 8: b[0] has rows 2t and 2t + 1 of column g, b[1] rows + 8. c is 16 x 8: c[0], c[1]
// are row g, columns 2t and 2t + 1; c[2], c[3] row g + 8.
__device__ inline void multiply(Bf16, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline void multiply(Half, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two elements of 16 bits, `low` in the low half, rounded to nearest even.
__device__ inline uint32_t pack(Bf16, float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ inline uint32_t pack(Half, float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- barriers in shared memory: a phase ends when `count` threads, and all bytes expected, have arrived.

__device__ inline void barrier_init(Barrier* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// Makes initialised barriers visible to bulk copies.
__device__ inline void barrier_init_done() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ inline void barrier_arrive(Barrier* barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives, and makes the phase wait for `bytes` more bytes of bulk copies.
__device__ inline void barrier_expect(Barrier* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
#endif
}

// Waits for the end of the phase of this parity: 0 is the first, 1 the second, 0 the third, ...
__device__ inline void barrier_wait(Barrier* barrier, int parity) {
  uint32_t ended;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
        : "=r"(ended)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                 : "=r"(ended)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#endif
  } while (!ended);
}

// For some of a block's warps (`threads` threads); id from 1 to 15.
__device__ inline void sync_some(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- asynchronous copies from global to shared memory, both aligned to 16 bytes

__device__ inline void copy_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}

// The thread arrives when all its copies by copy_16 have ended.
__device__ inline void arrive_with_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// `bytes` is a multiple of 16. They count for `barrier` once they are copied.
__device__ inline void copy_bulk(void* shared, const void* global, int bytes, Barrier* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}

// ---- launches

// Returns cudaSuccess, or the error.
template <class Args>
int launch(void (*kernel)(Args), dim3 grid, int threads, int shared, void* stream, const Args& args) {
  // Above 48 KiB dynamic shared memory has to be requested, once for each kernel and device.
  cudaError_t error = cudaSuccess;
  if (shared > 48 * 1024)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  kernel<<<grid, threads, shared, static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

inline const char* error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // namespace vllm_evict

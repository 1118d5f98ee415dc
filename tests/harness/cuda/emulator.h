// Runs the kernels of csrc/cuda on a CPU, for tests: blocks one after another, each thread a fiber, in random order.
// Stands in for CUDA's own names and for csrc/cuda/ptx.cuh, whose comments say what each function does.
//
// What is wrong on a GPU only sometimes is wrong here always: shared memory starts as NaN; the target of an
// asynchronous copy turns NaN when it is asked for, and arrives, in random order, only when no thread can go on
// without it. A warp's instruction runs when all its lanes are there; lanes at different instructions, more arrivals
// than a barrier counts, misaligned or stray addresses, threads that wait for ever and copies that nobody waited for
// are errors.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(int64_t x = 1, int64_t y = 1, int64_t z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx, blockIdx;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline int min(int a, int b) { return a < b ? a : b; }

namespace emulator {

constexpr int kWarp = 32;
constexpr size_t kStack = 128 * 1024;
constexpr int kError = 719;  // cudaErrorLaunchFailure

struct Piece {
  void* shared;
  const void* global;
  int bytes;
};

struct Fiber {
  unsigned thread;
  ucontext_t start;
  jmp_buf state;
  bool started = false, done = false;
  std::vector<Piece> copies;  // of copy_16, that no barrier tracks yet
};

struct Warp {
  int arrived = 0;
  std::string instruction;
  void* lanes[kWarp];
};

struct ThreadBarrier {
  std::vector<Fiber*> waiting;
};

struct MemoryBarrier {
  int count, pending, phase = 0;
  int64_t bytes = 0;
  std::vector<Fiber*> waiting;
};

struct Copy {
  std::vector<Piece> pieces;
  uint64_t* barrier;
  bool bulk;
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> ready;
  std::vector<Warp> warps;
  std::map<int, ThreadBarrier> barriers;
  std::map<uint64_t*, MemoryBarrier> memory_barriers;
  std::vector<Copy> copies;
  unsigned char* shared;
  int shared_bytes;
};

inline Block* block;
inline Fiber* current;
inline jmp_buf scheduler;
inline std::string error;
inline std::mt19937 order;
inline std::vector<std::unique_ptr<char[]>> stacks;
inline void (*body)(const void*);
inline const void* body_args;

[[noreturn]] inline void fail(const std::string& what) {
  error = "thread " + std::to_string(threadIdx.x) + " of block " + std::to_string(blockIdx.x) + ", " +
          std::to_string(blockIdx.y) + ", " + std::to_string(blockIdx.z) + ": " + what;
  _longjmp(scheduler, 2);
}

// Until wake() names this thread.
[[gnu::noinline]] inline void wait() {
  if (!_setjmp(current->state)) _longjmp(scheduler, 1);
}

inline void wake(Fiber* fiber) { block->ready.push_back(fiber); }

[[gnu::noinline]] inline void begin() {
  body(body_args);
  if (!current->copies.empty()) fail("ended with copies that no barrier tracks");
  current->done = true;
  _longjmp(scheduler, 1);
}

inline void check_shared(const void* pointer, int64_t bytes, int alignment, const char* what) {
  const auto* at = static_cast<const unsigned char*>(pointer);
  if (at < block->shared || at + bytes > block->shared + block->shared_bytes)
    fail(std::string(what) + ": not in shared memory");
  if (reinterpret_cast<uintptr_t>(at) % alignment) fail(std::string(what) + ": misaligned in shared memory");
}

// One instruction of a warp: `run` gets what each lane passed.
template <class Lane, class Run>
void together(const char* instruction, Lane& mine, Run run) {
  Warp& warp = block->warps[current->thread / kWarp];
  if (warp.arrived == 0)
    warp.instruction = instruction;
  else if (warp.instruction != instruction)
    fail(std::string(instruction) + ", and other lanes of the warp " + warp.instruction);
  warp.lanes[current->thread % kWarp] = &mine;
  if (++warp.arrived < kWarp) return wait();
  warp.arrived = 0;
  Lane* lanes[kWarp];
  for (int i = 0; i < kWarp; ++i) lanes[i] = static_cast<Lane*>(warp.lanes[i]);
  run(lanes);
  const unsigned first = current->thread / kWarp * kWarp;
  for (unsigned i = first; i < first + kWarp; ++i)
    if (i != current->thread) wake(block->fibers[i].get());
}

inline void sync(int id, int threads) {
  auto& waiting = block->barriers[id].waiting;
  waiting.push_back(current);
  if (static_cast<int>(waiting.size()) < threads) return wait();
  for (Fiber* fiber : waiting)
    if (fiber != current) wake(fiber);
  waiting.clear();
}

inline MemoryBarrier& barrier_at(uint64_t* barrier) {
  const auto found = block->memory_barriers.find(barrier);
  if (found == block->memory_barriers.end()) fail("a barrier that was not initialised");
  return found->second;
}

inline void arrive(uint64_t* barrier, int threads, int64_t bytes) {
  MemoryBarrier& b = barrier_at(barrier);
  b.pending -= threads;
  b.bytes += bytes;
  if (b.pending < 0 || b.bytes < 0) fail("more arrived than the barrier waits for");
  if (b.pending > 0 || b.bytes != 0) return;
  b.phase ^= 1;
  b.pending = b.count;
  for (Fiber* fiber : b.waiting) wake(fiber);
  b.waiting.clear();
}

inline Piece ask(void* shared, const void* global, int bytes) {
  check_shared(shared, bytes, 16, "copy");
  if (bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16) fail("copy: misaligned in global memory");
  std::memset(shared, 0xff, bytes);
  return {shared, global, bytes};
}

inline void land_one() {
  auto& copies = block->copies;
  std::swap(copies[order() % copies.size()], copies.back());
  const Copy copy = std::move(copies.back());
  copies.pop_back();
  int64_t bytes = 0;
  for (const auto& piece : copy.pieces) {
    std::memcpy(piece.shared, piece.global, piece.bytes);
    bytes += piece.bytes;
  }
  copy.bulk ? arrive(copy.barrier, 0, -bytes) : arrive(copy.barrier, 1, 0);
}

inline void run_block(int threads, unsigned char* shared, int shared_bytes) {
  Block it;
  block = &it;
  it.shared = shared;
  it.shared_bytes = shared_bytes;
  std::memset(shared, 0xff, shared_bytes);
  it.warps.resize(threads / kWarp);
  for (int i = 0; i < threads; ++i) {
    it.fibers.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *it.fibers.back();
    fiber.thread = i;
    getcontext(&fiber.start);
    if (stacks.size() <= static_cast<size_t>(i)) stacks.push_back(std::make_unique<char[]>(kStack));
    fiber.start.uc_stack.ss_sp = stacks[i].get();
    fiber.start.uc_stack.ss_size = kStack;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, begin, 0);
    it.ready.push_back(&fiber);
  }
  volatile int alive = threads;  // lives on when a thread jumps back here
  while (alive > 0) {
    const int how = _setjmp(scheduler);
    if (how == 2) return;
    if (how == 1) {
      if (current->done) alive = alive - 1;
      continue;
    }
    if (it.ready.empty()) {
      if (it.copies.empty()) fail("all threads wait for each other");
      land_one();
      continue;
    }
    std::swap(it.ready[order() % it.ready.size()], it.ready.back());
    current = it.ready.back();
    it.ready.pop_back();
    threadIdx = dim3(current->thread);
    if (current->started) _longjmp(current->state, 1);
    current->started = true;
    setcontext(&current->start);
  }
  if (!it.copies.empty()) error = "a block ended with copies that nobody waited for";
}

inline float from_bits(uint16_t bits, bool half) {
  if (half) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
  }
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline uint16_t to_bits(float value, bool half) {
  uint16_t bits;
  if (half) {
    const _Float16 rounded = static_cast<_Float16>(value);
    std::memcpy(&bits, &rounded, 2);
    return bits;
  }
  uint32_t wide;
  std::memcpy(&wide, &value, 4);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

struct Load {
  const void* row;
  uint32_t* m;
};

template <bool kTransposed>
void load(uint32_t (&m)[4], const void* row) {
  check_shared(row, 16, 16, "ldmatrix");
  Load mine{row, m};
  together(kTransposed ? "ldmatrix.trans" : "ldmatrix", mine, [](Load** lanes) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t elements[8][8];
      for (int row = 0; row < 8; ++row) std::memcpy(elements[row], lanes[8 * matrix + row]->row, 16);
      for (int lane = 0; lane < kWarp; ++lane) {
        const int g = lane / 4, t = lane % 4;
        const uint32_t low = kTransposed ? elements[2 * t][g] : elements[g][2 * t];
        const uint32_t high = kTransposed ? elements[2 * t + 1][g] : elements[g][2 * t + 1];
        lanes[lane]->m[matrix] = low | high << 16;
      }
    }
  });
}

struct Product {
  float* c;
  const uint32_t *a, *b;
};

inline void multiply(bool half, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Product mine{c, a, b};
  together("mma", mine, [half](Product** lanes) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < kWarp; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int high = 0; high < 2; ++high) {
        const auto element = [&](uint32_t bits) { return from_bits(static_cast<uint16_t>(bits >> 16 * high), half); };
        for (int i = 0; i < 4; ++i) left[g + 8 * (i % 2)][2 * t + high + 8 * (i / 2)] = element(lanes[lane]->a[i]);
        for (int i = 0; i < 2; ++i) right[2 * t + high + 8 * i][g] = element(lanes[lane]->b[i]);
      }
    }
    for (int lane = 0; lane < kWarp; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
        lanes[lane]->c[i] += sum;
      }
  });
}

template <class T>
struct Shuffle {
  T value, got;
  int from;
};

template <class T>
T shuffle(T value, int from) {
  Shuffle<T> mine{value, value, from};
  together("shfl", mine, [](Shuffle<T>** lanes) {
    for (int lane = 0; lane < kWarp; ++lane) lanes[lane]->got = lanes[lanes[lane]->from]->value;
  });
  return mine.got;
}

}  // namespace emulator

template <class T>
T __shfl_sync(unsigned, T value, int from) {
  return emulator::shuffle(value, from % 32);
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int other) {
  return emulator::shuffle(value, static_cast<int>(threadIdx.x % 32) ^ other);
}

inline void __syncwarp() {
  int nothing = 0;
  emulator::together("bar.warp", nothing, [](int**) {});
}

inline void __syncthreads() { emulator::sync(0, static_cast<int>(emulator::block->fibers.size())); }

namespace vllm_evict {

struct Bf16 {
  static constexpr bool half = false;
};
struct Half {
  static constexpr bool half = true;
};
using Barrier = uint64_t;
constexpr bool kHasBulk = true;

inline void stop() { emulator::fail("stop"); }
inline unsigned char* dynamic_shared() { return emulator::block->shared; }

inline void load_matrices(uint32_t (&m)[4], const void* row) { emulator::load<false>(m, row); }
inline void load_transposed(uint32_t (&m)[4], const void* row) { emulator::load<true>(m, row); }

inline uint32_t transpose(uint32_t m) {
  emulator::Shuffle<uint32_t> mine{m, 0, 0};
  emulator::together("movmatrix", mine, [](emulator::Shuffle<uint32_t>** lanes) {
    const auto element = [&](int row, int column) {
      return lanes[4 * row + column / 2]->value >> 16 * (column % 2) & 0xffff;
    };
    for (int lane = 0; lane < emulator::kWarp; ++lane)
      lanes[lane]->got = element(2 * (lane % 4), lane / 4) | element(2 * (lane % 4) + 1, lane / 4) << 16;
  });
  return mine.got;
}

template <class T>
void multiply(T, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::multiply(T::half, c, a, b);
}

template <class T>
uint32_t pack(T, float low, float high) {
  return emulator::to_bits(low, T::half) | static_cast<uint32_t>(emulator::to_bits(high, T::half)) << 16;
}

inline float exp2_of(float x) { return std::exp2(x); }
inline float log2_of(float x) { return std::log2(x); }

inline void barrier_init(Barrier* barrier, int count) {
  emulator::check_shared(barrier, 8, 8, "barrier");
  emulator::block->memory_barriers[barrier] = {count, count, 0, 0, {}};
}
inline void barrier_init_done() {}
inline void barrier_arrive(Barrier* barrier) { emulator::arrive(barrier, 1, 0); }
inline void barrier_expect(Barrier* barrier, int bytes) { emulator::arrive(barrier, 1, bytes); }

inline void barrier_wait(Barrier* barrier, int parity) {
  auto& b = emulator::barrier_at(barrier);
  while (b.phase == parity) {
    b.waiting.push_back(emulator::current);
    emulator::wait();
  }
}

inline void sync_some(int id, int threads) { emulator::sync(id, threads); }

inline void copy_16(void* shared, const void* global) {
  emulator::current->copies.push_back(emulator::ask(shared, global, 16));
}

inline void arrive_with_copies(Barrier* barrier) {
  emulator::block->copies.push_back({std::move(emulator::current->copies), barrier, false});
  emulator::current->copies.clear();
}

inline void copy_bulk(void* shared, const void* global, int bytes, Barrier* barrier) {
  emulator::block->copies.push_back({{emulator::ask(shared, global, bytes)}, barrier, true});
}

template <class Args>
int launch(void (*kernel)(Args), dim3 grid, int threads, int shared_bytes, void*, const Args& args) {
  using Call = std::pair<void (*)(Args), const Args*>;
  const Call call{kernel, &args};
  emulator::body = [](const void* made) {
    const Call& call = *static_cast<const Call*>(made);
    call.first(*call.second);
  };
  emulator::body_args = &call;
  emulator::error.clear();
  const size_t bytes = (shared_bytes + 127) / 128 * 128 + 128;
  std::unique_ptr<unsigned char[], void (*)(void*)> memory(
      static_cast<unsigned char*>(std::aligned_alloc(128, bytes)), std::free);
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        emulator::run_block(threads, memory.get(), shared_bytes);
        if (!emulator::error.empty()) return emulator::kError;
      }
  return 0;
}

inline const char* error_string(int code) {
  return code == emulator::kError ? emulator::error.c_str() : "invalid argument";
}

}  // namespace vllm_evict

// Another order of threads and copies.
extern "C" inline __attribute__((used)) void vllm_evict_emulator_seed(unsigned seed) { emulator::order.seed(seed); }

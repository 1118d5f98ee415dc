// Products of queries with boxes. A source file for each instruction set includes it, and defines
// ISA, LANES, and WIDEN_U16 and WIDEN_F16 if there are instructions for them (see mass_kernel.h).

#include "reach.h"

namespace vllm_evict::ISA {
namespace {

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t WordVec __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * LANES)));

template <class V>
inline V load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

struct F32 {
  static constexpr int64_t bytes = 4;
  static Vec at(const void* from) { return load<Vec>(from); }
  static float one(const char* from) { return load<float>(from); }
};

struct BF16 {
  static constexpr int64_t bytes = 2;
  static Vec at(const void* from) {
#ifdef WIDEN_U16
    return (Vec)((WordVec)WIDEN_U16(load<HalfVec>(from)) << 16);
#else
    return (Vec)(__builtin_convertvector(load<HalfVec>(from), WordVec) << 16);
#endif
  }
  static float one(const char* from) {
    const uint32_t word = (uint32_t)load<uint16_t>(from) << 16;
    return load<float>(&word);
  }
};

struct F16 {
  static constexpr int64_t bytes = 2;
  static float one(const char* from) {
    _Float16 x;
    __builtin_memcpy(&x, from, 2);
    return (float)x;
  }
  static Vec at(const void* from) {
#ifdef WIDEN_F16
    return (Vec)WIDEN_F16(load<HalfVec>(from));
#else
    Vec v;
    for (int i = 0; i < LANES; ++i) v[i] = one((const char*)from + 2 * i);
    return v;
#endif
  }
};

template <class T>
void products_of(const float* query, int64_t count, int64_t dim, const char* boxes,
                 int64_t box_stride, const int32_t* places, int64_t num, float* products,
                 int64_t stride) {
  const int64_t size = 2 * dim;
  for (int64_t n = 0; n < num; ++n) {
    const char* box = boxes + places[n] * box_stride * T::bytes;
    for (int64_t q = 0; q < count; ++q) {
      const float* own = query + q * size;
      Vec sum{};
      int64_t d = 0;
      for (; d + LANES <= size; d += LANES) sum += load<Vec>(own + d) * T::at(box + d * T::bytes);
      float total = 0;
      for (int i = 0; i < LANES; ++i) total += sum[i];
      for (; d < size; ++d) total += own[d] * T::one(box + d * T::bytes);
      products[q * stride + n] = total;
    }
  }
}

void box_products(const float* query, int64_t count, int64_t dim, const void* boxes, Type type,
                  int64_t box_stride, const int32_t* places, int64_t num, float* products,
                  int64_t stride) {
  const auto of = type == Type::f32    ? products_of<F32>
                  : type == Type::bf16 ? products_of<BF16>
                                       : products_of<F16>;
  of(query, count, dim, (const char*)boxes, box_stride, places, num, products, stride);
}

}  // namespace
}  // namespace vllm_evict::ISA

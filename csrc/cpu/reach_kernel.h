// Products of queries with boxes. A source file for each instruction set includes it, and defines
// ISA, LANES, and WIDEN_U16 and WIDEN_F16 if there are instructions for them (see mass_kernel.h).

#include "reach.h"
#include "vectors.h"

namespace vllm_evict::ISA {
namespace {

template <class T>
void products_of(const float* query, int64_t count, int64_t dim, const void* boxes,
                 int64_t box_stride, const int32_t* places, int64_t num, float* products,
                 int64_t stride) {
  const int64_t size = 2 * dim;
  for (int64_t n = 0; n < num; ++n) {
    const T* box = (const T*)boxes + places[n] * box_stride;
    for (int64_t q = 0; q < count; ++q) {
      const float* own = query + q * size;
      Vec sum{};
      for (int64_t d = 0; d < size; d += LANES) sum += load<Vec>(own + d) * widen(box + d);
      float total = 0;
      for (int i = 0; i < LANES; ++i) total += sum[i];
      products[q * stride + n] = total;
    }
  }
}

void box_products(const float* query, int64_t count, int64_t dim, const void* boxes, Type type,
                  int64_t box_stride, const int32_t* places, int64_t num, float* products,
                  int64_t stride) {
  const auto of = type == Type::f32    ? products_of<float>
                  : type == Type::bf16 ? products_of<Bf16>
                                       : products_of<F16>;
  of(query, count, dim, boxes, box_stride, places, num, products, stride);
}

}  // namespace
}  // namespace vllm_evict::ISA

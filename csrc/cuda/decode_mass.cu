// Launchers of decode_mass.cuh, by shape and dtype.

#include <type_traits>

#include "decode_mass.cuh"

namespace vllm_evict {
namespace {

constexpr int kUnsupported = 1;  // cudaErrorInvalidValue

// Calls run(D, tiles of query heads), both constants, for a supported shape; otherwise returns kUnsupported.
template <class Run>
int64_t with_shape(int64_t head_dim, int64_t group, Run run) {
  using std::integral_constant;
  const auto with_dim = [&](auto dim) -> int64_t {
    if (group >= 1 && group <= kHeadTile) return run(dim, integral_constant<int, 1>{});
    // Outputs of 16 heads of size 256 do not fit the registers.
    if constexpr (dim() < 256)
      if (group > kHeadTile && group <= 2 * kHeadTile) return run(dim, integral_constant<int, 2>{});
    return kUnsupported;
  };
  if (head_dim == 64) return with_dim(integral_constant<int, 64>{});
  if (head_dim == 128) return with_dim(integral_constant<int, 128>{});
  if (head_dim == 256) return with_dim(integral_constant<int, 256>{});
  return kUnsupported;
}

template <class T>
int decode(const DecodeArgs& a, void* stream) {
  const int64_t error = with_shape(a.head_dim, a.group, [&](auto dim, auto tiles) {
    const dim3 grid(a.kv_heads, a.splits, a.n);
    const auto kernel = a.bulk ? attend<T, dim(), tiles(), true> : attend<T, dim(), tiles(), false>;
    return launch(kernel, grid, kThreads, shared_bytes<dim(), tiles()>(a.depth), stream, a);
  });
  if (error != 0) return static_cast<int>(error);
  const int64_t heads = a.kv_heads * a.group;
  const int64_t tiles = a.granules == nullptr ? 0 : (a.measured + kMassBlocks - 1) / kMassBlocks;
  const dim3 grid(heads + a.mass_heads * tiles, a.n);
  const int shared = static_cast<int>((kSums + a.splits) * sizeof(float));
  return launch(combine<T>, grid, kCombineThreads, shared, stream, a);
}

}  // namespace
}  // namespace vllm_evict

int64_t vllm_evict_decode_args_size() { return sizeof(vllm_evict::DecodeArgs); }

int64_t vllm_evict_decode_shared_bytes(int64_t head_dim, int64_t group, int64_t depth) {
  int64_t bytes = 0;
  vllm_evict::with_shape(head_dim, group, [&](auto dim, auto tiles) {
    bytes = vllm_evict::shared_bytes<dim(), tiles()>(depth);
    return 0;
  });
  return bytes;
}

int vllm_evict_decode_mass(const vllm_evict::DecodeArgs* args, void* stream) {
  using namespace vllm_evict;
  const DecodeArgs& a = *args;
  if (a.n == 0) return 0;
  if (a.block_size % kChunk != 0 || a.depth < 1) return kUnsupported;
  return a.half ? decode<Half>(a, stream) : decode<Bf16>(a, stream);
}

const char* vllm_evict_error(int code) { return vllm_evict::error_string(code); }

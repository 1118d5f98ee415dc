#include "choose.h"

#include <stdexcept>
#include <vector>
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace vllm_evict {

using std::optional;
using std::string;

namespace {

#if defined(__x86_64__)
// Asks Linux for AMX's registers, for all threads of the process. False if the CPU has no AMX for
// bfloat16, or Linux refuses.
bool request_amx() {
#if defined(__linux__)
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a, b, c, d = 0;
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  return (d & kBf16) && (d & kTiles) && !syscall(SYS_arch_prctl, kRequestPermission, kTileData);
#else
  return false;
#endif
}
#endif

bool runs(const Kernel* kernel) {
  if (!kernel) return false;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (kernel == avx2_kernel) return avx2;
  if (kernel == avx512_kernel) return avx512;
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (kernel == avx512_bf16_kernel) return bf16;
  if (kernel == amx_bf16_kernel) return bf16 && request_amx();
#endif
  return true;
}

}  // namespace

const Kernel& choose_kernel(const optional<string>& isa) {
  // In the order of speed, the fastest first.
  static const std::vector<const Kernel*> kernels = [] {
    std::vector<const Kernel*> found;
    for (const Kernel* kernel : {amx_bf16_kernel, avx512_bf16_kernel, avx512_kernel, avx2_kernel,
                                 portable_kernel})
      if (runs(kernel)) found.push_back(kernel);
    return found;
  }();
  if (!isa) return *kernels.front();
  for (const Kernel* kernel : kernels)
    if (*isa == kernel->name) return *kernel;
  throw std::invalid_argument(
      "isa must be amx_bf16, avx512_bf16, avx512, avx2 or portable, and one that this CPU runs");
}

const MoveRows* choose_moves(const optional<string>& isa) {
  bool squeezes = avx512_moves != nullptr;
#if defined(__x86_64__)
  squeezes = squeezes && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vbmi2");
#endif
  if (isa && *isa != "portable" && !(*isa == "avx512" && squeezes))
    throw std::invalid_argument("isa must be avx512 or portable, and one that this CPU runs");
  return squeezes && isa != "portable" ? avx512_moves : portable_moves;
}

const ReachKernel& choose_reach(const optional<string>& isa) {
  // The kernels of attention know what this CPU runs.
  const string path = choose_kernel(isa).name;
  if (avx512_reach && (path == "amx_bf16" || path.starts_with("avx512"))) {
#if defined(__x86_64__)
    if (avx512_vnni_reach && isa != "avx512" && __builtin_cpu_supports("avx512vnni")) return *avx512_vnni_reach;
#endif
    return *avx512_reach;
  }
  return avx2_reach && path == "avx2" ? *avx2_reach : *portable_reach;
}

}  // namespace vllm_evict

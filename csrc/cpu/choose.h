// Which kernels this CPU runs.
#pragma once

#include <optional>
#include <string>

#include "compact.h"
#include "mass.h"
#include "reach.h"

namespace vllm_evict {

// `isa` forces one of the kernels; without it the fastest is chosen. Throw std::invalid_argument, which
// Python gets as ValueError, if this CPU does not run it.
const Kernel& choose_kernel(const std::optional<std::string>& isa);
const MoveRows* choose_moves(const std::optional<std::string>& isa);
const ReachKernel& choose_reach(const std::optional<std::string>& isa);

}  // namespace vllm_evict

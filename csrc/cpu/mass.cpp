// block_mass: mass of all queries of a batch. prompt_mass: output and mass of some prompts.
// Divides a batch into units of work, runs them, and adds up their results in an order that
// depends on nothing but the batch's shape.

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "batch.h"

namespace vllm_evict {
namespace {

constexpr int64_t kRowsPerPass = 64;          // query rows that share one pass over the keys
constexpr int64_t kMaxUnits = 64;             // units per request and KV head
constexpr int64_t kMaxSplitBytes = 32 << 20;  // scratch memory of all units at once
// Scratch for mass by token, for each request: powers of a pass, and results of its units.
constexpr int64_t kMaxPowersBytes = 8 << 20;
constexpr int64_t kMaxPartialBytes = 32 << 20;

// One request of the batch.
struct Request {
  int64_t index;
  int64_t first_token, num_tokens;  // range of its tokens in Plan::tokens
  int64_t blocks;
  int64_t pass_tokens;  // tokens that share a pass
};

// Successive passes over one request's keys of one KV head, by one thread.
struct Unit {
  const Request* request;
  int64_t kv_head;
  int64_t first_token, num_tokens;
  int64_t partial;  // index of its result in Plan::partials
};

struct Plan {
  std::vector<int32_t> tokens;  // indices in the query; without output those of non-zero weight
  std::vector<Request> requests;
  std::vector<Unit> units;
  int64_t partials = 0;
  // Maxima over requests: passes of a unit, tokens of a pass, blocks.
  int64_t unit_passes = 0, pass_tokens = 0, max_blocks = 0;
  int64_t powers = 0;  // floats of a pass's powers, the maximum
  double work = 0;  // multiply-adds
};

int64_t tokens_per_pass(const MassArgs& a, int64_t blocks) {
  int64_t rows = kRowsPerPass;
  if (a.per_token)
    rows = std::min<int64_t>(rows, kMaxPowersBytes / (sizeof(float) * folded(a, blocks)));
  return std::max<int64_t>(1, rows / (a.heads / a.kv_heads));
}

int64_t max_units(const MassArgs& a, int64_t blocks) {
  if (!a.out || !a.per_token) return kMaxUnits;
  const int64_t bytes = sizeof(float) * folded(a, blocks) * a.kv_heads;
  return std::clamp<int64_t>(kMaxPartialBytes / bytes, 1, kMaxUnits);
}

void add_request(const MassArgs& a, int64_t r, bool attends, Plan& plan) {
  const int64_t first = plan.tokens.size();
  for (int32_t t = a.starts[r]; t < a.starts[r + 1]; ++t)
    if (attends || !a.weights || a.weights[t] != 0) plan.tokens.push_back(t);
  const int64_t count = plan.tokens.size() - first;
  if (!count) return;
  const int64_t blocks = ceil_div(a.lens[r], a.block_size);
  check_blocks(a, r, blocks);
  plan.requests.push_back({r, first, count, blocks, tokens_per_pass(a, blocks)});
}

void add_units(const MassArgs& a, const Kernel& kernel, const Request& request, Plan& plan) {
  const int64_t per_pass = request.pass_tokens;
  const int64_t passes = ceil_div(request.num_tokens, per_pass);
  const int64_t unit_passes = ceil_div(passes, max_units(a, request.blocks));
  for (int64_t head = 0; head < a.kv_heads; ++head) {
    for (int64_t t = 0; t < request.num_tokens; t += unit_passes * per_pass) {
      const int64_t count = std::min(unit_passes * per_pass, request.num_tokens - t);
      plan.units.push_back({&request, head, request.first_token + t, count, plan.partials});
      if (a.out) plan.partials += folded(a, request.blocks);
    }
  }
  plan.unit_passes = std::max(plan.unit_passes, unit_passes);
  const int64_t pass_tokens = std::min(per_pass, request.num_tokens);
  plan.pass_tokens = std::max(plan.pass_tokens, pass_tokens);
  if (a.out && a.per_token)
    plan.powers = std::max(plan.powers, folded(a, request.blocks) *
                                            power_rows(kernel, pass_tokens * (a.heads / a.kv_heads)));
  plan.max_blocks = std::max(plan.max_blocks, request.blocks);
  plan.work += double(request.num_tokens) * request.blocks * a.block_size * a.heads * a.dim;
}

// Of the requests of several tokens among the rows of `d`; of all requests if it is null.
Plan make_plan(const MassArgs& a, const Kernel& kernel, const DecodeArgs* d) {
  check_starts(a);
  Plan plan;
  plan.requests.reserve(a.requests);
  for (int64_t i = 0; i < (d ? d->num_rows : a.requests); ++i) {
    const int64_t r = d ? d->rows[i] : i;
    if (!d || a.starts[r + 1] - a.starts[r] > 1) add_request(a, r, d != nullptr, plan);
  }
  for (const Request& request : plan.requests) add_units(a, kernel, request, plan);
  return plan;
}

// One read of a unit's keys, for up to kRowsPerPass rows (more if one token has more
// heads).
struct Pass {
  Rows rows;
  Blocks blocks;
  Tiles tiles;         // null if no row is measured
  int64_t num_blocks;  // blocks that some row sees
  Output output;       // null without output
};

// Memory of equal size for each pass.
class Scratch {
 public:
  Scratch(const MassArgs& a, const Kernel& kernel, const Plan& plan, bool attends) {
    rows_ = round_up(plan.pass_tokens * (a.heads / a.kv_heads), kRowAlign);
    q_ = rows_ * a.dim;
    tiles_ = rows_ * plan.max_blocks * (a.block_size / kernel.tile_tokens(a.block_size));
    powers_ = plan.powers;
    sums_ = attends ? q_ : 0;
  }
  int64_t bytes() const { return sizeof(float) * floats(); }
  void allocate(int64_t passes) { memory_.reset(new float[passes * floats()]); }

  float* q(int64_t i) const { return memory_.get() + i * floats(); }
  int32_t* seen(int64_t i) const { return reinterpret_cast<int32_t*>(q(i) + q_); }
  float* weights(int64_t i) const { return q(i) + q_ + rows_; }
  float* sinks(int64_t i) const { return weights(i) + rows_; }
  float* peak(int64_t i) const { return sinks(i) + rows_; }
  float* mass(int64_t i) const { return peak(i) + tiles_; }
  float* powers(int64_t i) const { return powers_ ? mass(i) + tiles_ : nullptr; }
  // Of Output, with its padding.
  float* sums(int64_t i) const { return mass(i) + tiles_ + powers_; }
  float* row_peak(int64_t i) const { return sums(i) + sums_; }
  float* row_mass(int64_t i) const { return row_peak(i) + rows_ + kRowAlign; }

 private:
  int64_t floats() const {
    return q_ + 3 * rows_ + 2 * tiles_ + powers_ + (sums_ ? sums_ + 2 * (rows_ + kRowAlign) : 0);
  }
  int64_t rows_, q_, tiles_, powers_, sums_;
  std::unique_ptr<float[]> memory_;
};

// The pass over a unit's tokens [first, first + count), in the i-th scratch.
Pass prepare(const MassArgs& a, const Kernel& kernel, const Plan& plan, const DecodeArgs* d,
             const Unit& unit, int64_t first, int64_t count, const Scratch& scratch, int64_t i) {
  const int64_t group = a.heads / a.kv_heads;
  const int64_t request = unit.request->index;
  const int32_t* tokens = plan.tokens.data() + unit.first_token + first;
  const int64_t rows = count * group;
  const int64_t columns = round_up(rows, kRowAlign);
  const Queries queries = queries_of(a, kernel, rows, d != nullptr);
  pack_queries(a, kernel, tokens, unit.kv_head * group, rows, queries, scratch.q(i));
  const int32_t before = a.lens[request] - a.starts[request + 1];
  bool measured = false;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t token = tokens[row / group];
    scratch.seen(i)[row] = before + token + 1;
    scratch.weights(i)[row] = a.weights ? a.weights[token] : 1.f;
    measured |= a.out && scratch.weights(i)[row] != 0;
  }
  std::fill(scratch.weights(i) + rows, scratch.weights(i) + columns, 0.f);
  fill_sinks(a, unit.kv_head * group, rows, columns, scratch.sinks(i));
  const int64_t num_blocks = ceil_div(before + tokens[count - 1] + 1, a.block_size);
  const int64_t tiles = num_blocks * (a.block_size / kernel.tile_tokens(a.block_size));
  if (measured) {
    std::fill_n(scratch.peak(i), tiles * columns, kUnseen);
    std::fill_n(scratch.mass(i), tiles * columns, 0.f);
  }
  const int64_t bytes = bytes_of(a.packing.type);
  const int64_t head = unit.kv_head * a.key_head_stride * bytes;
  Output output{};
  if (d) {
    output = {static_cast<const char*>(d->values) + head, scratch.sums(i), scratch.row_peak(i),
              scratch.row_mass(i)};
    std::fill_n(output.sums, columns * a.dim, 0.f);
    std::fill_n(output.peak, columns + kRowAlign, kUnseen);
    std::fill_n(output.mass, columns + kRowAlign, 0.f);
  }
  return {{scratch.q(i), queries, a.scale * kLog2e, a.soft_cap * kLog2e, scratch.seen(i),
           scratch.weights(i), a.sinks ? scratch.sinks(i) : nullptr, rows},
          {static_cast<const char*>(a.keys) + head, a.packing, a.key_block_stride, a.block_size,
           a.dim, a.table + request * a.table_stride},
          {measured ? scratch.peak(i) : nullptr, measured ? scratch.mass(i) : nullptr, columns,
           measured ? scratch.powers(i) : nullptr, power_rows(kernel, rows)},
          num_blocks, output};
}

// Adds a pass's mass to a unit's result.
void fold(const MassArgs& a, const Kernel& kernel, const Pass& pass, float* partial) {
  const auto fold = a.per_token ? kernel.fold_tokens : kernel.fold;
  fold(pass.rows, a.block_size, pass.num_blocks, pass.tiles, partial);
}

// One thread for each unit, for large batches, and for output.
void run_units(const MassArgs& a, const Kernel& kernel, const Plan& plan, const DecodeArgs* d,
               int threads, Scratch& scratch, float* partials) {
  scratch.allocate(threads);
  // Later units of a prefill see more keys, so they start first.
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t i = plan.units.size() - 1; i >= 0; --i) {
    const Unit& unit = plan.units[i];
    float* partial = partials + unit.partial;
    if (a.out) std::fill_n(partial, folded(a, unit.request->blocks), 0.f);
    const int64_t per_pass = unit.request->pass_tokens;
    for (int64_t t = 0; t < unit.num_tokens; t += per_pass) {
      const int64_t count = std::min(per_pass, unit.num_tokens - t);
      const Pass pass =
          prepare(a, kernel, plan, d, unit, t, count, scratch, omp_get_thread_num());
      if (d) {
        const Output& output = pass.output;
        kernel.attend(pass.rows, pass.blocks, 0, pass.num_blocks, pass.tiles, output);
        to_factors(a, pass.rows, pass.rows.count, output.peak, output.mass);
        write_rows(*d, plan.tokens.data() + unit.first_token + t,
                   unit.kv_head * (a.heads / a.kv_heads), pass.rows.count, output.sums,
                   output.mass);
      } else {
        kernel.score(pass.rows, pass.blocks, 0, pass.num_blocks, pass.tiles);
      }
      if (pass.tiles.mass) fold(a, kernel, pass, partial);
    }
  }
}

// Several threads for each unit, for a few decodes. The result does not depend on the
// threads, since a tile's statistics do not.
void run_pieces(const MassArgs& a, const Kernel& kernel, const Plan& plan, int threads,
                Scratch& scratch, float* partials) {
  const int64_t units = plan.units.size();
  scratch.allocate(units);
  std::vector<Pass> passes(units);
  const int64_t piece = ceil_div(kPieceTokens, a.block_size);
  const int64_t pieces = ceil_div(plan.max_blocks, piece);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (int64_t i = 0; i < units; ++i) {
      const Unit& unit = plan.units[i];
      passes[i] = prepare(a, kernel, plan, nullptr, unit, 0, unit.num_tokens, scratch, i);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t n = 0; n < units * pieces; ++n) {
      const Pass& pass = passes[n / pieces];
      const int64_t begin = n % pieces * piece;
      const int64_t end = std::min(begin + piece, pass.num_blocks);
      if (begin < end) kernel.score(pass.rows, pass.blocks, begin, end, pass.tiles);
    }
#pragma omp for
    for (int64_t i = 0; i < units; ++i) {
      float* partial = partials + plan.units[i].partial;
      std::fill_n(partial, folded(a, plan.units[i].request->blocks), 0.f);
      fold(a, kernel, passes[i], partial);
    }
  }
}

void add_partials(const MassArgs& a, const Plan& plan, const float* partials) {
  for (const Unit& unit : plan.units) {
    float* out = a.out + unit.request->index * a.out_request_stride;
    if (!a.sum_heads) out += unit.kv_head * a.out_head_stride;
    const float* partial = partials + unit.partial;
    const int64_t count = entries(a, unit.request->index, unit.request->blocks);
    for (int64_t j = 0; j < count; ++j) out[j] += partial[j];
  }
}

}  // namespace

void block_mass(const MassArgs& a, const Kernel& kernel, int threads) {
  const Plan plan = make_plan(a, kernel, nullptr);
  if (plan.units.empty()) return;
  if (plan.work < kSerialWork) threads = 1;
  Scratch scratch(a, kernel, plan, false);
  std::unique_ptr<float[]> partials(new float[plan.partials]);
  const int64_t units = plan.units.size();
  if (threads > 1 && units < 4 * threads && plan.unit_passes == 1 &&
      units * scratch.bytes() <= kMaxSplitBytes)
    run_pieces(a, kernel, plan, threads, scratch, partials.get());
  else
    run_units(a, kernel, plan, nullptr, threads, scratch, partials.get());
  add_partials(a, plan, partials.get());
}

void prompt_mass(const DecodeArgs& d, const Kernel& kernel, int threads) {
  const MassArgs& a = d.mass;
  const Plan plan = make_plan(a, kernel, &d);
  if (plan.units.empty()) return;
  if (plan.work < kSerialWork) threads = 1;
  Scratch scratch(a, kernel, plan, true);
  std::unique_ptr<float[]> partials(new float[plan.partials]);
  run_units(a, kernel, plan, &d, threads, scratch, partials.get());
  if (a.out) add_partials(a, plan, partials.get());
}

}  // namespace vllm_evict

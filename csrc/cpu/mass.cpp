// Divides a batch into units of work, runs them, and adds up the results in an
// order that depends on the batch's shape alone.

#include "mass.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <omp.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

namespace vllm_evict {
namespace {

constexpr int64_t kRowsPerPass = 64;   // query rows that share one pass over the keys
constexpr int64_t kMaxChunks = 64;     // units per request and KV head
constexpr int64_t kPieceTokens = 512;  // least keys worth a thread's while
constexpr int64_t kMaxSplitBytes = 32 << 20;
constexpr int64_t kSerialWork = 1 << 17;  // multiply-adds below which one thread is faster
constexpr float kLog2e = 1.44269504f;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One request's share of the batch.
struct Request {
  int64_t index;
  int64_t first_token, num_tokens;  // its tokens of non-zero weight, in Plan::tokens
  int64_t blocks;
};

// Consecutive passes over one request's keys under one KV head, by one thread.
struct Unit {
  const Request* request;
  int64_t kv_head;
  int64_t first_token, num_tokens;
  int64_t partial;  // its result's place in Plan::partials
};

struct Plan {
  std::vector<int32_t> tokens;  // places in the query, zero weights left out
  std::vector<Request> requests;
  std::vector<Unit> units;
  int64_t partials = 0;
  int64_t max_tokens = 0;  // of a pass
  int64_t max_blocks = 0;
  int64_t max_passes = 0;  // of a unit
  double work = 0;         // multiply-adds
};

int64_t tokens_per_pass(const MassArgs& a) {
  return std::max<int64_t>(1, kRowsPerPass / (a.heads / a.kv_heads));
}

void require(bool valid, const char* sentence) {
  if (!valid) throw std::invalid_argument(sentence);
}

void check_starts(const MassArgs& a) {
  bool ascending = a.starts[0] >= 0 && a.starts[a.requests] <= a.tokens;
  for (int64_t r = 0; r < a.requests; ++r) ascending &= a.starts[r] <= a.starts[r + 1];
  require(ascending, "query_start_loc must ascend within 0 and T");
}

void check_blocks(const MassArgs& a, const Request& request) {
  const int64_t r = request.index;
  require(a.lens[r] >= a.starts[r + 1] - a.starts[r], "seq_lens must include the queries");
  require(request.blocks <= a.table_width && request.blocks <= a.out_width,
          "block_table and out must be as wide as the longest request has blocks");
  bool valid = true;
  for (int64_t j = 0; j < request.blocks; ++j) {
    const int32_t block = a.table[r * a.table_stride + j];
    valid &= block >= 0 && block < a.num_blocks;
  }
  require(valid, "block_table must hold block ids of key_cache");
}

Plan make_plan(const MassArgs& a) {
  check_starts(a);
  Plan plan;
  plan.requests.reserve(a.requests);
  for (int64_t r = 0; r < a.requests; ++r) {
    const int64_t first = plan.tokens.size();
    for (int32_t t = a.starts[r]; t < a.starts[r + 1]; ++t)
      if (!a.weights || a.weights[t] != 0) plan.tokens.push_back(t);
    const int64_t count = plan.tokens.size() - first;
    if (!count) continue;
    plan.requests.push_back({r, first, count, ceil_div(a.lens[r], a.block_size)});
    check_blocks(a, plan.requests.back());
  }
  const int64_t per_pass = tokens_per_pass(a);
  for (const Request& request : plan.requests) {
    const int64_t passes = ceil_div(request.num_tokens, per_pass);
    const int64_t per_unit = ceil_div(passes, kMaxChunks);
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      for (int64_t t = 0; t < request.num_tokens; t += per_unit * per_pass) {
        const int64_t count = std::min(per_unit * per_pass, request.num_tokens - t);
        plan.units.push_back({&request, head, request.first_token + t, count, plan.partials});
        plan.partials += request.blocks;
      }
    }
    plan.max_passes = std::max(plan.max_passes, per_unit);
    plan.max_tokens = std::max(plan.max_tokens, std::min(per_pass, request.num_tokens));
    plan.max_blocks = std::max(plan.max_blocks, request.blocks);
    plan.work += double(request.num_tokens) * request.blocks * a.block_size * a.heads * a.dim;
  }
  return plan;
}

// Room for one pass: its rows and its tiles.
struct Scratch {
  float* q;
  int32_t* seen;
  float* weights;
  Tiles tiles;
};

class ScratchPool {
 public:
  ScratchPool(const MassArgs& a, const Kernel& kernel, const Plan& plan) {
    rows_ = plan.max_tokens * (a.heads / a.kv_heads);
    q_ = ceil_div(rows_, kernel.rows) * kernel.rows * a.dim;
    const int64_t tiles = plan.max_blocks * (a.block_size / kernel.tile_tokens(a.block_size));
    stride_ = ceil_div(tiles, kTileAlign) * kTileAlign;
  }
  int64_t floats() const { return q_ + 2 * rows_ + 2 * rows_ * stride_; }
  void allocate(int64_t count) { memory_.reset(new float[count * floats()]); }
  Scratch operator[](int64_t i) const {
    float* q = memory_.get() + i * floats();
    float* seen = q + q_;
    float* weights = seen + rows_;
    float* peak = weights + rows_;
    return {q, reinterpret_cast<int32_t*>(seen), weights, {peak, peak + rows_ * stride_, stride_}};
  }

 private:
  int64_t rows_, q_, stride_;
  std::unique_ptr<float[]> memory_;
};

template <class T>
void pack_row(const void* query, int64_t offset, int64_t dim, float scale, float* to,
              int64_t step) {
  const T* from = static_cast<const T*>(query) + offset;
  for (int64_t d = 0; d < dim; ++d) to[d * step] = static_cast<float>(from[d]) * scale;
}

// Rows of `count` tokens from `first` (of plan.tokens) under the unit's KV head.
Rows pack_rows(const MassArgs& a, const Kernel& kernel, const Plan& plan, const Unit& unit,
               int64_t first, int64_t count, const Scratch& scratch) {
  const int64_t group = a.heads / a.kv_heads;
  const int64_t request = unit.request->index;
  const int64_t unseen = a.starts[request + 1] - a.lens[request];
  const int64_t rows = count * group;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = plan.tokens[first + row / group];
    const int64_t head = unit.kv_head * group + row % group;
    const int64_t begin = row / kernel.rows * kernel.rows;
    const int64_t step = kernel.padded(std::min(kernel.rows, rows - begin));
    const int64_t offset = token * a.query_token_stride + head * a.query_head_stride;
    float* to = scratch.q + begin * a.dim + (row - begin);
    const float scale = a.scale * kLog2e;
    if (a.query_type == Type::f32) pack_row<float>(a.query, offset, a.dim, scale, to, step);
    if (a.query_type == Type::bf16)
      pack_row<c10::BFloat16>(a.query, offset, a.dim, scale, to, step);
    if (a.query_type == Type::f16) pack_row<c10::Half>(a.query, offset, a.dim, scale, to, step);
    scratch.seen[row] = static_cast<int32_t>(token + 1 - unseen);
    scratch.weights[row] = a.weights ? a.weights[token] : 1.f;
  }
  return {scratch.q, scratch.seen, scratch.weights, rows};
}

Blocks blocks_of(const MassArgs& a, const Unit& unit) {
  const int64_t bytes = a.packing == Packing::f32 ? 4 : 2;
  const char* keys = static_cast<const char*>(a.keys) + unit.kv_head * a.key_head_stride * bytes;
  const int32_t* table = a.table + unit.request->index * a.table_stride;
  return {keys, a.packing, a.key_block_stride, a.block_size, a.dim, table};
}

int64_t seen_blocks(const MassArgs& a, const Rows& rows) {
  return ceil_div(rows.seen[rows.count - 1], a.block_size);
}

// A unit per thread at a time: the way of large batches.
void run_units(const MassArgs& a, const Kernel& kernel, const Plan& plan, int threads,
               ScratchPool& pool, float* partials) {
  pool.allocate(threads);
  const int64_t per_pass = tokens_per_pass(a);
  // Later units of a prefill see more keys, so they start first.
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t i = plan.units.size() - 1; i >= 0; --i) {
    const Unit& unit = plan.units[i];
    const Scratch scratch = pool[omp_get_thread_num()];
    const Blocks blocks = blocks_of(a, unit);
    float* partial = partials + unit.partial;
    std::fill_n(partial, unit.request->blocks, 0.f);
    for (int64_t t = 0; t < unit.num_tokens; t += per_pass) {
      const int64_t count = std::min(per_pass, unit.num_tokens - t);
      const Rows rows = pack_rows(a, kernel, plan, unit, unit.first_token + t, count, scratch);
      kernel.score(rows, blocks, 0, seen_blocks(a, rows), scratch.tiles);
      kernel.fold(rows, a.block_size, scratch.tiles, partial);
    }
  }
}

// Several threads per unit: the way of a few decodes. A tile's statistics do not
// depend on who computes them, so neither does the result.
void run_pieces(const MassArgs& a, const Kernel& kernel, const Plan& plan, int threads,
                ScratchPool& pool, float* partials) {
  const int64_t units = plan.units.size();
  pool.allocate(units);
  std::vector<Rows> rows(units);
  const int64_t piece = ceil_div(kPieceTokens, a.block_size);
  const int64_t pieces = ceil_div(plan.max_blocks, piece);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (int64_t i = 0; i < units; ++i) {
      const Unit& unit = plan.units[i];
      rows[i] =
          pack_rows(a, kernel, plan, unit, unit.first_token, unit.num_tokens, pool[i]);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t n = 0; n < units * pieces; ++n) {
      const int64_t i = n / pieces, begin = n % pieces * piece;
      const int64_t end = std::min(begin + piece, seen_blocks(a, rows[i]));
      if (begin < end)
        kernel.score(rows[i], blocks_of(a, plan.units[i]), begin, end, pool[i].tiles);
    }
#pragma omp for
    for (int64_t i = 0; i < units; ++i) {
      float* partial = partials + plan.units[i].partial;
      std::fill_n(partial, plan.units[i].request->blocks, 0.f);
      kernel.fold(rows[i], a.block_size, pool[i].tiles, partial);
    }
  }
}

void add_partials(const MassArgs& a, const Plan& plan, const float* partials) {
  for (const Unit& unit : plan.units) {
    float* out = a.out + unit.request->index * a.out_request_stride;
    if (!a.sum_heads) out += unit.kv_head * a.out_head_stride;
    const float* partial = partials + unit.partial;
    for (int64_t j = 0; j < unit.request->blocks; ++j) out[j] += partial[j];
  }
}

}  // namespace

void block_mass(const MassArgs& a, const Kernel& kernel, int threads) {
  const Plan plan = make_plan(a);
  if (plan.units.empty()) return;
  if (plan.work < kSerialWork) threads = 1;
  ScratchPool pool(a, kernel, plan);
  std::unique_ptr<float[]> partials(new float[plan.partials]);
  const int64_t units = plan.units.size();
  const bool split = threads > 1 && units < 4 * threads && plan.max_passes == 1 &&
                     units * pool.floats() * int64_t(sizeof(float)) <= kMaxSplitBytes;
  (split ? run_pieces : run_units)(a, kernel, plan, threads, pool, partials.get());
  add_partials(a, plan, partials.get());
}

}  // namespace vllm_evict

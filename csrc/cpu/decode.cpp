// Decode attention with the mass of each block or token: output and statistics from one read of
// keys and values. Pieces of a request's keys have a fixed size, so the bits of a result do not
// depend on the batch or the number of threads. Classes of heads share the threads.

#include <omp.h>

#include <memory>
#include <vector>

#include "batch.h"

namespace vllm_evict {
namespace {

// The only token of a request and one KV head.
struct Item {
  int64_t request, kv_head;
  int32_t token;
  int64_t blocks, pieces;
  int64_t piece;  // index of its first piece among all
  int64_t tile;   // index of its first tile among all; -1: no mass
  int64_t mass;   // index of its first block or token among all
};

struct Work {
  std::vector<Item> items;
  std::vector<int32_t> item_of;  // piece -> item
  int64_t tiles = 0, masses = 0;
  double multiply_adds = 0;
};

class Decode {
 public:
  Decode(const DecodeArgs& args, const Kernel& kernel)
      : d_(args),
        a_(args.mass),
        kernel_(kernel),
        group_(a_.heads / a_.kv_heads),
        columns_(round_up(group_, kRowAlign)),
        power_rows_(power_rows(kernel, group_)),
        tiles_per_block_(a_.block_size / kernel.tile_tokens(a_.block_size)),
        piece_blocks_(ceil_div(kPieceTokens, a_.block_size)) {}

  // Checks the arguments and lists the work: attend() to each piece, then finish() each item.
  void plan();
  void attend(int64_t piece, void* memory);
  void finish(int64_t item, void* memory);
  void add_mass();

  int64_t pieces() const { return work_.item_of.size(); }
  int64_t items() const { return work_.items.size(); }
  double multiply_adds() const { return work_.multiply_adds; }
  // Bytes that a thread needs to pack a row.
  int64_t row_bytes() const { return columns_ * (a_.dim + 3) * sizeof(float); }

 private:
  // A piece's part of the output: sums, peaks and masses.
  int64_t part_floats() const { return columns_ * a_.dim + 4 * columns_; }
  float* part(int64_t piece) { return parts_.get() + piece * part_floats(); }
  Tiles tiles(const Item& item) {
    if (item.tile < 0) return {nullptr, nullptr, columns_, nullptr, power_rows_};
    return {peaks_.get() + item.tile * columns_, masses_.get() + item.tile * columns_, columns_,
            a_.per_token ? powers_.get() + item.mass * power_rows_ : nullptr, power_rows_};
  }
  Rows rows(const Item& item, void* memory, bool with_queries);

  const DecodeArgs& d_;
  const MassArgs& a_;
  const Kernel& kernel_;
  const int64_t group_, columns_, power_rows_, tiles_per_block_, piece_blocks_;
  Work work_;
  std::unique_ptr<float[]> parts_, peaks_, masses_, powers_, folded_;
};

void Decode::plan() {
  check_starts(a_);
  int64_t pieces = 0;
  for (int64_t i = 0; i < d_.num_rows; ++i) {
    const int64_t r = d_.rows[i];
    require(r >= 0 && r < a_.requests, "rows must be requests of the batch");
    const int64_t blocks = ceil_div(a_.lens[r], a_.block_size);
    check_blocks(a_, r, blocks);
    if (a_.starts[r + 1] - a_.starts[r] != 1) continue;  // prompt_mass attends
    const int32_t token = a_.starts[r];
    const bool measured = a_.out && (!a_.weights || a_.weights[token] != 0);
    for (int64_t head = 0; head < a_.kv_heads; ++head) {
      const int64_t count = ceil_div(blocks, piece_blocks_);
      work_.item_of.insert(work_.item_of.end(), count, work_.items.size());
      work_.items.push_back(
          {r, head, token, blocks, count, pieces, measured ? work_.tiles : -1, work_.masses});
      pieces += count;
      if (!measured) continue;
      work_.tiles += blocks * tiles_per_block_;
      work_.masses += folded(a_, blocks);
    }
    work_.multiply_adds += 2. * blocks * a_.block_size * a_.heads * a_.dim;
  }
  parts_.reset(new float[pieces * part_floats()]);
  peaks_.reset(new float[work_.tiles * columns_]);
  masses_.reset(new float[work_.tiles * columns_]);
  if (a_.per_token) powers_.reset(new float[work_.masses * power_rows_]);
  folded_.reset(new float[work_.masses]);
}

// Layout of `memory`: packed queries, then the tokens that each row sees, then weights, then sinks.
Rows Decode::rows(const Item& item, void* memory, bool with_queries) {
  const Queries queries = queries_of(a_, kernel_, group_, true);
  float* q = static_cast<float*>(memory);
  int32_t* seen = reinterpret_cast<int32_t*>(q + columns_ * a_.dim);
  float* weights = q + columns_ * (a_.dim + 1);
  if (with_queries)
    pack_queries(a_, kernel_, &item.token, item.kv_head * group_, group_, queries, q);
  std::fill_n(seen, group_, a_.lens[item.request]);
  std::fill_n(weights, columns_, 0.f);
  std::fill_n(weights, group_, a_.weights ? a_.weights[item.token] : 1.f);
  float* sinks = weights + columns_;
  fill_sinks(a_, item.kv_head * group_, group_, columns_, sinks);
  return {q, queries, a_.scale * kLog2e, a_.soft_cap * kLog2e, seen, weights,
          a_.sinks ? sinks : nullptr, group_};
}

void Decode::attend(int64_t piece, void* memory) {
  const Item& item = work_.items[work_.item_of[piece]];
  const int64_t begin = (piece - item.piece) * piece_blocks_;
  const int64_t end = std::min(begin + piece_blocks_, item.blocks);
  float* sums = part(piece);
  float* peak = sums + columns_ * a_.dim;
  float* mass = peak + 2 * columns_;
  std::fill_n(sums, columns_ * a_.dim, 0.f);
  std::fill_n(peak, 2 * columns_, kUnseen);
  std::fill_n(mass, 2 * columns_, 0.f);
  const Tiles all = tiles(item);
  if (all.mass) {
    const int64_t first = begin * tiles_per_block_ * columns_;
    const int64_t count = (end - begin) * tiles_per_block_ * columns_;
    std::fill_n(all.peak + first, count, kUnseen);
    std::fill_n(all.mass + first, count, 0.f);
  }
  const int64_t bytes = bytes_of(a_.packing.type);
  const int64_t head = item.kv_head * a_.key_head_stride * bytes;
  const Blocks blocks = {static_cast<const char*>(a_.keys) + head,
                         a_.packing,
                         a_.key_block_stride,
                         a_.block_size,
                         a_.dim,
                         a_.table + item.request * a_.table_stride};
  kernel_.attend(rows(item, memory, true), blocks, begin, end, all,
                 {static_cast<const char*>(d_.values) + head, sums, peak, mass});
}

// Combines an item's pieces in order, and computes mass from its tiles.
void Decode::finish(int64_t index, void* memory) {
  const Item& item = work_.items[index];
  float* sums = part(item.piece);
  float* peak = sums + columns_ * a_.dim;
  float* mass = peak + 2 * columns_;
  for (int64_t piece = item.piece + 1; piece < item.piece + item.pieces; ++piece) {
    const float* more = part(piece);
    const float* its_peak = more + columns_ * a_.dim;
    const float* its_mass = its_peak + 2 * columns_;
    for (int64_t row = 0; row < group_; ++row) {
      const float top = std::max(peak[row], its_peak[row]);
      const float ours = std::exp2(peak[row] - top), theirs = std::exp2(its_peak[row] - top);
      float* to = sums + row * a_.dim;
      const float* from = more + row * a_.dim;
      for (int64_t dim = 0; dim < a_.dim; ++dim) to[dim] = to[dim] * ours + from[dim] * theirs;
      mass[row] = mass[row] * ours + its_mass[row] * theirs;
      peak[row] = top;
    }
  }
  const Rows all = rows(item, memory, false);
  to_factors(a_, all, group_, peak, mass);
  write_rows(d_, &item.token, item.kv_head * group_, group_, sums, mass);
  if (item.tile < 0) return;
  float* to = folded_.get() + item.mass;
  std::fill_n(to, folded(a_, item.blocks), 0.f);
  const auto fold = a_.per_token ? kernel_.fold_tokens : kernel_.fold;
  fold(all, a_.block_size, item.blocks, tiles(item), to);
}

void Decode::add_mass() {
  for (const Item& item : work_.items) {
    if (item.tile < 0) continue;
    float* out = a_.out + item.request * a_.out_request_stride;
    if (!a_.sum_heads) out += item.kv_head * a_.out_head_stride;
    const float* from = folded_.get() + item.mass;
    const int64_t count = entries(a_, item.request, item.blocks);
    for (int64_t j = 0; j < count; ++j) out[j] += from[j];
  }
}

// A piece or an item of one of the classes.
struct Unit {
  Decode* decode;
  int64_t index;
};

}  // namespace

void decode_mass(const std::vector<DecodeArgs>& classes, const Kernel& kernel, int threads) {
  std::vector<std::unique_ptr<Decode>> decodes;
  std::vector<Unit> pieces, items;
  double multiply_adds = 0;
  int64_t row_bytes = 0;
  for (const DecodeArgs& args : classes) {
    Decode* decode = decodes.emplace_back(new Decode(args, kernel)).get();
    decode->plan();
    for (int64_t piece = 0; piece < decode->pieces(); ++piece) pieces.push_back({decode, piece});
    for (int64_t item = 0; item < decode->items(); ++item) items.push_back({decode, item});
    multiply_adds += decode->multiply_adds();
    row_bytes = std::max(row_bytes, decode->row_bytes());
  }
  for (const DecodeArgs& args : classes) prompt_mass(args, kernel, threads);
  if (items.empty()) return;
  if (multiply_adds < kSerialWork) threads = 1;
  const int64_t num_pieces = pieces.size(), num_items = items.size();
  std::unique_ptr<char[]> memory(new char[threads * row_bytes]);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    void* mine = memory.get() + omp_get_thread_num() * row_bytes;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_pieces; ++i) pieces[i].decode->attend(pieces[i].index, mine);
#pragma omp for
    for (int64_t i = 0; i < num_items; ++i) items[i].decode->finish(items[i].index, mine);
  }
  for (const auto& decode : decodes) decode->add_mass();
}

}  // namespace vllm_evict

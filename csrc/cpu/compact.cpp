// Compaction, one layer and head at a time. compute/kernels/compact.py says when tokens move directly
// (`ordered`). Otherwise they go through scratch memory.

#include "compact.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <unordered_map>

namespace vllm_evict {
namespace {

constexpr int64_t kSerialBytes = 1 << 17;  // below this size one thread is faster
constexpr int64_t kAmxTokens = 16;         // tokens in a group of keys
constexpr int64_t kAmxDims = 16;           // elements in a group of values
constexpr int64_t kMaxRun = 256;           // most tokens of a group that move together

void require(bool valid, const char* sentence) {
  if (!valid) throw std::invalid_argument(sentence);
}

// One request of the call.
struct Request {
  const int32_t *source, *target;
  int64_t sources, targets;
  int64_t first, kept;  // range in keep
  bool ordered;         // is_ordered of compute/kernels/compact.py
};

// One head's blocks: pages of a cache, or successive blocks of scratch.
struct Place {
  char* first;
  int64_t stride;
  const int32_t* table;  // null: scratch
  char* block(int64_t index) const { return first + (table ? table[index] : index) * stride; }
};

// Tokens to move, in ascending order: those of `keep`, or without it the first ones.
struct Move {
  Place from, to;
  const int32_t* keep;
  int64_t kept, block_size, dim;
  int64_t token(int64_t slot) const { return keep ? keep[slot] : slot; }
};

template <class Word>
void move_rows(const KeyRun& run) {
  const Word* from = reinterpret_cast<const Word*>(run.from);
  Word* to = reinterpret_cast<Word*>(run.to);
  for (int64_t row = 0; row < run.rows; ++row, from += run.columns, to += run.columns) {
    // Hardware prefetchers cannot follow the block table.
    __builtin_prefetch(reinterpret_cast<const char*>(from) + run.next, 0, 2);
    for (int64_t i = 0; i < run.count; ++i) to[i] = from[run.column[i]];
  }
}

constexpr MoveRows kPortableMoves[] = {move_rows<uint8_t>, move_rows<uint16_t>,
                                       move_rows<uint32_t>};

// Keys: a group has `columns` tokens, and the words of a token lie `columns` words apart.
void move_keys(const Move& m, MoveRows move, int64_t columns, int64_t rows, int64_t word_bytes) {
  const auto group_of = [&](const Place& place, int64_t token) {
    const int64_t first = token / columns * columns;
    return place.block(first / m.block_size) + first % m.block_size * rows * word_bytes;
  };
  int32_t column[kMaxRun];
  for (int64_t slot = 0; slot < m.kept;) {
    const int64_t first = m.token(slot) / columns * columns;
    const int64_t end = std::min({m.kept, slot / columns * columns + columns, slot + kMaxRun});
    int64_t count = 0;
    for (; slot + count < end && m.token(slot + count) < first + columns; ++count)
      column[count] = static_cast<int32_t>(m.token(slot + count) - first);
    const char* from = group_of(m.from, first);
    const int64_t after = slot + count < m.kept ? m.token(slot + count) : first;
    move({from, group_of(m.to, slot) + slot % columns * word_bytes, column, count, columns, rows,
          group_of(m.from, after) - from});
    slot += count;
  }
}

// Values in rows of one token each. Successive kept tokens move together.
void move_values(const Move& m, int64_t offset, int64_t row_bytes) {
  for (int64_t slot = 0; slot < m.kept;) {
    const int64_t token = m.token(slot);
    const int64_t in_from = token % m.block_size, in_to = slot % m.block_size;
    const int64_t most = std::min(m.kept - slot, m.block_size - std::max(in_from, in_to));
    int64_t run = 1;
    while (run < most && m.token(slot + run) == token + run) ++run;
    // Source and target may overlap.
    std::memmove(m.to.block(slot / m.block_size) + offset + in_to * row_bytes,
                 m.from.block(token / m.block_size) + offset + in_from * row_bytes,
                 run * row_bytes);
    slot += run;
  }
}

// Values in groups of dims, with two tokens interleaved.
template <class Element>
void move_value_pairs(const Move& m, int64_t offset) {
  const auto place = [&](char* block, int64_t token) {
    const int64_t in = token % m.block_size;
    return reinterpret_cast<Element*>(block + offset) + in / 2 * (2 * kAmxDims) + in % 2;
  };
  for (int64_t slot = 0; slot < m.kept; ++slot) {
    const int64_t token = m.token(slot);
    const Element* from = place(m.from.block(token / m.block_size), token);
    Element* to = place(m.to.block(slot / m.block_size), slot);
    const int64_t step = m.block_size * kAmxDims;
    for (int64_t dim = 0; dim < m.dim; dim += kAmxDims, from += step, to += step)
      for (int64_t i = 0; i < 2 * kAmxDims; i += 2) to[i] = from[i];
  }
}

void move(const Move& m, const MoveRows* moves, int64_t item_bytes, bool amx) {
  const int64_t values = m.block_size * m.dim * item_bytes;
  const int64_t word_bytes = amx ? 2 * item_bytes : item_bytes;  // amx: pairs of dims
  const MoveRows rows = moves[word_bytes / 2];
  if (amx) {
    move_keys(m, rows, kAmxTokens, m.dim / 2, word_bytes);
    (item_bytes == 2 ? move_value_pairs<uint16_t> : move_value_pairs<uint8_t>)(m, values);
  } else {
    move_keys(m, rows, m.block_size, m.dim, word_bytes);
    move_values(m, values, m.dim * item_bytes);
  }
}

void check_starts(const int32_t* starts, int64_t requests, int64_t end) {
  bool valid = starts[0] == 0 && starts[requests] == end;
  for (int64_t r = 0; r < requests; ++r) valid &= starts[r] <= starts[r + 1];
  require(valid, "starts must ascend from 0 to the lengths of source, keep and target");
}

void check_blocks(const int32_t* blocks, int64_t count, int64_t num_blocks) {
  const bool valid =
      std::all_of(blocks, blocks + count, [=](int32_t id) { return id >= 0 && id < num_blocks; });
  require(valid, "source and target must hold block ids of caches");
}

void check_tokens(const CompactArgs& a, const Request& request) {
  bool valid = true;
  for (size_t layer = 0; layer < (a.keep_layer_stride ? a.layers.size() : 1); ++layer)
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      const int32_t* keep =
          a.keep + layer * a.keep_layer_stride + head * a.keep_head_stride + request.first;
      int64_t last = -1;
      for (int64_t i = 0; i < request.kept; last = keep[i++]) valid &= keep[i] > last;
      valid &= last < request.sources * a.block_size;
    }
  require(valid, "keep must ascend within the tokens of source");
}

std::vector<Request> check(const CompactArgs& a) {
  check_starts(a.source_starts, a.requests, a.sources);
  check_starts(a.keep_starts, a.requests, a.kept);
  check_starts(a.target_starts, a.requests, a.targets);
  check_blocks(a.source, a.sources, a.num_blocks);
  check_blocks(a.target, a.targets, a.num_blocks);
  std::vector<Request> requests;
  std::unordered_map<int32_t, int64_t> places;  // target block -> its index among all
  for (int64_t i = 0; i < a.targets; ++i) places.emplace(a.target[i], i);
  bool valid = static_cast<int64_t>(places.size()) == a.targets;
  for (int64_t r = 0; r < a.requests; ++r) {
    const int64_t source = a.source_starts[r], target = a.target_starts[r];
    Request request = {a.source + source, a.target + target,
                       a.source_starts[r + 1] - source, a.target_starts[r + 1] - target,
                       a.keep_starts[r], a.keep_starts[r + 1] - a.keep_starts[r], true};
    require(request.kept <= request.targets * a.block_size, "target must hold all kept tokens");
    check_tokens(a, request);
    for (int64_t i = 0; i < request.sources; ++i) {
      const auto found = places.find(request.source[i]);
      if (found == places.end()) continue;
      const int64_t place = found->second - target;
      valid &= place >= 0 && place < request.targets;
      request.ordered &= i <= place;
    }
    requests.push_back(request);
  }
  require(valid, "target must hold each block once, and none of another request's source");
  return requests;
}

}  // namespace

const MoveRows* const portable_moves = kPortableMoves;

void compact(const CompactArgs& a, const MoveRows* moves, int threads) {
  const std::vector<Request> requests = check(a);
  const int64_t page = 2 * a.block_size * a.dim * a.item_bytes;  // bytes of a block and head
  int64_t scratch_bytes = 0;
  for (const Request& request : requests)
    if (!request.ordered) scratch_bytes = std::max(scratch_bytes, request.targets * page);
  const int64_t heads = a.layers.size() * a.kv_heads, units = requests.size() * heads;
  if (heads * a.kept * 2 * a.dim * a.item_bytes < kSerialBytes) threads = 1;
  std::unique_ptr<char[]> scratch(new char[threads * scratch_bytes]);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t unit = 0; unit < units; ++unit) {
    const Request& request = requests[unit / heads];
    const int64_t layer = unit % heads / a.kv_heads, head = unit % a.kv_heads;
    const LayerPages& pages = a.layers[layer];
    char* first = pages.pages + head * pages.head_stride;
    const Place from = {first, pages.block_stride, request.source};
    const Place to = {first, pages.block_stride, request.target};
    const Place aside = {scratch.get() + omp_get_thread_num() * scratch_bytes, page, nullptr};
    const int32_t* keep =
        a.keep + layer * a.keep_layer_stride + head * a.keep_head_stride + request.first;
    const Move tokens = {from, request.ordered ? to : aside, keep,
                         request.kept, a.block_size, a.dim};
    move(tokens, moves, a.item_bytes, a.amx);
    if (request.ordered) continue;
    const Move back = {aside, to, nullptr, request.kept, a.block_size, a.dim};
    move(back, moves, a.item_bytes, a.amx);
  }
}

}  // namespace vllm_evict

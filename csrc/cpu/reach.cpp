#include "reach.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace vllm_evict {
namespace {

float widened(const void* from, Type type, int64_t at) {
  if (type == Type::f32) return static_cast<const float*>(from)[at];
  const uint16_t half = static_cast<const uint16_t*>(from)[at];
  if (type == Type::bf16) {
    const uint32_t word = static_cast<uint32_t>(half) << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
  }
  _Float16 x;
  std::memcpy(&x, &half, 2);
  return static_cast<float>(x);
}

// The score of a block whose logits are not all finite: below that of any other.
constexpr float kUnknown = -1;

struct alignas(64) Line {
  float floats[16];
};
using Lines = std::unique_ptr<Line[]>;

Lines lines_of(int64_t floats) { return std::make_unique_for_overwrite<Line[]>((floats + 15) / 16); }

// Blocks that tiles score, packed. Those of one prompt score the same ones, up to different ends.
struct Packed {
  std::vector<int32_t> places;
  Lines panels;  // [KV heads, panels]
};

// Scratch of one thread.
struct Scratch {
  std::vector<float> query, logits, shares;
  std::vector<int32_t> places, order, best, where, free;
  std::vector<char> taken;
};

// Blocks that a thread scores at once, if threads share out a row, and least products of numbers that it takes for that.
constexpr int64_t kChunk = 256, kShared = 1 << 20;

const int32_t* written_of(const ReachArgs& a, int64_t row) {
  return a.written + a.out_rows[row] * a.written_stride;
}

const int32_t* numbers_of(const ReachArgs& a, int64_t row) {
  return a.numbers + a.slots[row] * a.width;
}

void find_places(const ReachArgs& a, int64_t row, std::vector<int32_t>& places) {
  const int32_t *numbers = numbers_of(a, row), *written = written_of(a, row);
  places.resize(a.full[row]);
  for (int64_t n = 0; n < a.full[row]; ++n)
    places[n] = numbers[n] >= 0 ? static_cast<int32_t>(a.pool) + numbers[n] : written[n];
}

bool is_tile(const ReachArgs& a, int64_t row) {
  return a.index.kind == Kind::signs && a.dim <= kTileDims && a.query_counts[row] >= kTileQueries;
}

// Finds what to pack for rows that are tiles. Returns the number of each row in `packed`, or -1.
std::vector<int64_t> find_packed(const ReachArgs& a, std::vector<Packed>& packed) {
  std::vector<int64_t> of_rows(a.rows, -1);
  std::vector<int32_t> places;
  for (int64_t row = 0; row < a.rows; ++row) {
    if (!a.leads || !a.chooses[row] || !is_tile(a, row)) continue;
    find_places(a, row, places);
    const auto same = [&](const std::vector<int32_t>& last) {
      return std::equal(places.begin(), places.begin() + std::min(places.size(), last.size()), last.begin());
    };
    if (packed.empty() || !same(packed.back().places)) packed.emplace_back();
    if (places.size() > packed.back().places.size()) packed.back().places.swap(places);
    of_rows[row] = packed.size() - 1;
  }
  return of_rows;
}

// Panels of one KV head, and their floats.
int64_t panels_of(const ReachKernel& kernel, const Packed& packed) {
  return (static_cast<int64_t>(packed.places.size()) + kernel.panel - 1) / kernel.panel;
}
int64_t packed_floats(const ReachArgs& a, const ReachKernel& kernel, const Packed& packed) {
  return panels_of(kernel, packed) * kernel.panel_floats(a.dim, a.index.block_size);
}

// What one KV head of a row's queries is to the blocks, as BlockLogits have it.
void scale_queries(const ReachArgs& a, int64_t row, int64_t head, float* to) {
  const int64_t group = a.heads / a.index.kv_heads;
  for (int64_t i = 0; i < a.query_counts[row] * group; ++i)
    for (int64_t d = 0; d < a.dim; ++d) {
      const int64_t at = (a.queries[row] + i / group) * a.query_token_stride +
                         (head * group + i % group) * a.query_head_stride + d;
      const float q = widened(a.query, a.query_type, at) * a.scale;
      to[2 * i * a.dim + d] = a.index.kind == Kind::boxes ? std::max(q, 0.f) : q;
      to[(2 * i + 1) * a.dim + d] = std::min(q, 0.f);
    }
}

const float* sinks_of(const ReachArgs& a, int64_t row, int64_t head) {
  return a.sinks ? a.sinks + a.queries[row] * a.sink_stride + head * (a.heads / a.index.kv_heads) : nullptr;
}

// Adds to s.shares [queries, padded] what queries of a row that is a tile may pay to each block.
void score_tile(const ReachArgs& a, const ReachKernel& kernel, int64_t row, const Packed& packed, int64_t padded,
                Scratch& s) {
  const int64_t group = a.heads / a.index.kv_heads, count = a.query_counts[row];
  s.query.resize(2 * count * group * a.dim);
  const Lines scratch = lines_of(count * group * (padded + 1 + a.dim));
  for (int64_t head = 0; head < a.index.kv_heads; ++head) {
    scale_queries(a, row, head, s.query.data());
    const float* panels = packed.panels[0].floats + head * packed_floats(a, kernel, packed);
    kernel.tile(s.query.data(), count, group, a.dim, a.index.block_size, a.soft_cap, sinks_of(a, row, head),
                a.sink_stride, panels, a.full[row], scratch[0].floats, s.shares.data());
  }
}

// The same of another row. Several threads share out its heads and blocks.
void score_few(const ReachArgs& a, const ReachKernel& kernel, int64_t row, int64_t padded, int threads, Scratch& s) {
  const int64_t group = a.heads / a.index.kv_heads, full = a.full[row], count = a.query_counts[row] * group,
                chunk = threads > 1 ? kChunk : full;
  find_places(a, row, s.places);
  s.query.resize(2 * count * a.index.kv_heads * a.dim);
  s.logits.resize(count * a.index.kv_heads * padded);
  for (int64_t head = 0; head < a.index.kv_heads; ++head)
    scale_queries(a, row, head, s.query.data() + head * 2 * count * a.dim);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const Lines scratch = lines_of(16 * a.dim);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t head = 0; head < a.index.kv_heads; ++head)
      for (int64_t n = 0; n < full; n += chunk)
        kernel.logits(s.query.data() + head * 2 * count * a.dim, count, a.dim, a.index, head, a.soft_cap,
                      s.places.data() + n, std::min(chunk, full - n), scratch[0].floats,
                      s.logits.data() + head * count * padded + n, padded);
#pragma omp for collapse(2)
    for (int64_t head = 0; head < a.index.kv_heads; ++head)
      for (int64_t i = 0; i < count; ++i) {
        const float* sinks = sinks_of(a, row, head);
        kernel.shares(s.logits.data() + (head * count + i) * padded, full, padded,
                      sinks ? sinks[i / group * a.sink_stride + i % group] : -std::numeric_limits<float>::infinity());
      }
#pragma omp for
    for (int64_t n = 0; n < padded; n += 16)
      for (int64_t i = 0; i < a.index.kv_heads * count; ++i)
        for (int64_t k = n; k < n + 16; ++k)
          s.shares[i % count / group * padded + k] += s.logits[i * padded + k];
  }
}

// The share of attention that a query of the row may pay to each full block, summed up over heads;
// of several queries the largest.
void score(const ReachArgs& a, const ReachKernel& kernel, int64_t row, const Packed* packed, int threads, Scratch& s) {
  const int64_t full = a.full[row], count = a.query_counts[row], of_panel = packed ? kernel.panel : 16,
                padded = (full + of_panel - 1) / of_panel * of_panel;
  s.shares.assign(count * padded, 0.f);
  if (packed)
    score_tile(a, kernel, row, *packed, padded, s);
  else
    score_few(a, kernel, row, padded, full * a.index.block_size * a.index.kv_heads * a.dim < kShared ? 1 : threads, s);
  float* scores = a.scores + a.slots[row] * a.width;
  std::fill_n(scores, full, kUnknown);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t n = 0; n < full; ++n) scores[n] = std::max(scores[n], s.shares[i * padded + n]);  // NaN is not larger
}

// Notes the place of each block in the row's room; -1: it is not there.
void find_held(const ReachArgs& a, int64_t row, Scratch& s) {
  const int32_t* held = a.held + a.slots[row] * a.room;
  s.where.assign(a.full[row], -1);
  for (int64_t place = a.rooms[row] - 1; place >= 0; --place)
    if (held[place] >= 0 && held[place] < a.full[row]) s.where[held[place]] = static_cast<int32_t>(place);
}

// Puts candidates in order, those that the row reads first: the best ones, of equal ones the oldest.
// Returns how many of the best ones it reads others in place of.
int64_t choose(const ReachArgs& a, int64_t row, Scratch& s) {
  const float* scores = a.scores + a.slots[row] * a.width;
  const int32_t* numbers = numbers_of(a, row);
  const int64_t chosen = a.chosen[row];
  const auto sort = [&](auto first, auto middle, auto last) {
    std::partial_sort(first, middle, last, [&](int32_t one, int32_t other) {
      return scores[one] != scores[other] ? scores[one] > scores[other] : one < other;
    });
  };
  s.order.resize(a.end[row] - a.first[row]);
  std::iota(s.order.begin(), s.order.end(), a.first[row]);
  const auto first = s.order.begin(), last = s.order.end();
  sort(first, first + chosen, last);
  if (!a.fetch) return 0;
  s.best.assign(first, first + chosen);
  // The best of those that are there and of the best ones that may come; behind them the others.
  const auto absent = std::partition(
      first, last, [&](int32_t block) { return numbers[block] < 0 || s.where[block] >= 0; });
  const auto over = absent + std::min<int64_t>(a.fetch, last - absent);
  sort(absent, over, last);
  const int64_t kept = std::min<int64_t>(chosen, over - first);
  sort(first, first + kept, over);
  if (kept < chosen) sort(over, over + (chosen - kept), last);
  s.taken.assign(a.full[row], 0);
  for (int64_t i = 0; i < chosen; ++i) s.taken[first[i]] = 1;
  return std::count_if(s.best.begin(), s.best.end(), [&](int32_t block) { return !s.taken[block]; });
}

// Brings the chosen blocks of one row into its room, and notes and counts them.
void fetch(const ReachArgs& a, int64_t row, Scratch& s) {
  int32_t* counts = a.counts + a.slots[row] * 3;
  const int32_t *numbers = numbers_of(a, row), *written = written_of(a, row);
  const int32_t* room = written + a.first[row];
  const int64_t at = a.slots[row] * a.room;
  int32_t *held = a.held + at, *read = a.read + at, *out = a.picked + at;
  // Blocks that are in the room stay, before others take its places.
  s.taken.assign(a.rooms[row], 0);
  for (int64_t i = 0; i < a.chosen[row]; ++i) {
    const int32_t block = s.order[i];
    out[i] = -1;
    if (numbers[block] < 0) {
      out[i] = written[block];
      continue;
    }
    const int32_t place = s.where[block];
    if (place < 0) continue;
    ++counts[1];
    s.taken[place] = 1;
    read[place] = a.step;
    out[i] = room[place];
  }
  s.free.clear();
  for (int64_t place = 0; place < a.rooms[row]; ++place)
    if (!s.taken[place]) s.free.push_back(place);
  // What was read longest ago gives way.
  std::stable_sort(s.free.begin(), s.free.end(),
                   [&](int32_t one, int32_t other) { return read[one] < read[other]; });
  int64_t next = 0;
  for (int64_t i = 0; i < a.chosen[row]; ++i) {
    if (out[i] >= 0) continue;
    const int32_t place = s.free[next++], block = s.order[i];
    std::memcpy(a.cache + room[place] * a.cache_stride, a.host + numbers[block] * a.host_stride,
                a.page_bytes);
    held[place] = block;
    read[place] = a.step;
    out[i] = room[place];
    ++counts[0];
  }
}

// Names in the table what a row reads: blocks before `first`, chosen ones, blocks from `end` on.
void name(const ReachArgs& a, int64_t row) {
  const int32_t *written = written_of(a, row), *picked = a.picked + a.slots[row] * a.room;
  int32_t* out = a.out + a.out_rows[row] * a.out_stride;
  out = std::copy_n(written, a.first[row], out);
  out = std::copy_n(picked, a.chosen[row], out);
  std::copy(written + a.end[row], written + a.blocks[row], out);
}

bool within(const int32_t* values, int64_t count, int64_t least, int64_t below) {
  return std::all_of(values, values + count,
                     [&](int32_t value) { return value >= least && value < below; });
}

void check(const ReachArgs& a) {
  if (!within(a.slots, a.rows, 0, a.num_slots) || !within(a.out_rows, a.rows, 0, a.num_out_rows))
    throw std::invalid_argument("slots and rows of the table must be in range");
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t full = a.full[row], first = a.first[row], end = a.end[row],
                  chosen = a.chosen[row], room = a.rooms[row], blocks = a.blocks[row];
    if (full < 1 || full > a.width || blocks <= full || blocks > a.written_width || first < 0 ||
        first > end || end > full || chosen < 0 || chosen > end - first || chosen > room ||
        room > a.room || first + room > full || first + chosen + blocks - end > a.out_width)
      throw std::invalid_argument("a row must choose as many of its candidates as its room holds");
    if (!a.chooses[row]) {
      if (!within(a.picked + a.slots[row] * a.room, chosen, 0, a.cache_pages))
        throw std::invalid_argument("a row that does not choose must have chosen");
      continue;
    }
    const int32_t *numbers = numbers_of(a, row), *written = written_of(a, row);
    for (int64_t n = 0; n < full; ++n)
      if (numbers[n] < -1 || numbers[n] >= a.host_pages || written[n] < 0 ||
          written[n] >= a.cache_pages ||
          (numbers[n] < 0 ? written[n] : a.pool + numbers[n]) >= a.index.blocks)
        throw std::invalid_argument("blocks must be in the index, in the cache and on the host");
  }
}

}  // namespace

void reach(const ReachArgs& a, const ReachKernel& kernel, int threads) {
  check(a);
  std::vector<Packed> packed;
  const std::vector<int64_t> packed_of = find_packed(a, packed);
  for (Packed& its : packed) its.panels = lines_of(a.index.kv_heads * packed_floats(a, kernel, its));
  // A row for each thread, or all threads for each row.
  const bool shared = a.rows >= threads;
#pragma omp parallel num_threads(threads) if (threads > 1 && (shared || !packed.empty()))
  {
    for (Packed& its : packed) {
#pragma omp for collapse(2) nowait
      for (int64_t head = 0; head < a.index.kv_heads; ++head)
        for (int64_t i = 0; i < panels_of(kernel, its); ++i) {
          const int64_t first = i * kernel.panel, num = its.places.size() - first;
          kernel.pack(a.index, head, a.dim, its.places.data() + first, std::min(num, kernel.panel),
                      its.panels[0].floats + head * packed_floats(a, kernel, its) +
                          i * kernel.panel_floats(a.dim, a.index.block_size));
        }
    }
#pragma omp barrier
    Scratch s;
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < a.rows; ++row) {
      if (!a.chooses[row]) {
        name(a, row);
        continue;
      }
      if (a.leads) {
        const Packed* its = packed_of[row] < 0 ? nullptr : &packed[packed_of[row]];
        score(a, kernel, row, its, shared ? 1 : threads, s);
      }
      find_held(a, row, s);
      a.counts[a.slots[row] * 3 + 2] += static_cast<int32_t>(choose(a, row, s));
      fetch(a, row, s);
      name(a, row);
    }
  }
}

}  // namespace vllm_evict

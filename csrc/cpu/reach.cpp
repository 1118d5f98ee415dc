#include "reach.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
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

// Scratch of one thread.
struct Scratch {
  std::vector<float> query, logits, scores;
  std::vector<int32_t> places, order, free;
  std::vector<char> taken;
};

const int32_t* written_of(const ReachArgs& a, int64_t row) {
  return a.written + a.out_rows[row] * a.written_stride;
}

const int32_t* numbers_of(const ReachArgs& a, int64_t row) {
  return a.numbers + a.slots[row] * a.width;
}

// The share of attention that the row's query may pay to each full block, summed up over heads.
void score(const ReachArgs& a, BlockLogits block_logits, int64_t row, Scratch& s) {
  const int64_t group = a.heads / a.index.kv_heads, full = a.full[row], size = 2 * a.dim;
  s.query.resize(group * size);
  s.logits.resize(group * full);
  s.scores.assign(full, 0.f);
  s.places.resize(full);
  const int32_t *numbers = numbers_of(a, row), *written = written_of(a, row);
  for (int64_t n = 0; n < full; ++n)
    s.places[n] = numbers[n] >= 0 ? static_cast<int32_t>(a.pool) + numbers[n] : written[n];
  for (int64_t head = 0; head < a.index.kv_heads; ++head) {
    for (int64_t g = 0; g < group; ++g)
      for (int64_t d = 0; d < a.dim; ++d) {
        const int64_t at = a.queries[row] * a.query_token_stride +
                           (head * group + g) * a.query_head_stride + d;
        const float q = widened(a.query, a.query_type, at) * a.scale;
        s.query[g * size + d] = a.index.signs ? q : std::max(q, 0.f);
        s.query[g * size + a.dim + d] = std::min(q, 0.f);
      }
    block_logits(s.query.data(), group, a.dim, a.index, head, a.soft_cap, s.places.data(), full,
                 s.logits.data(), full);
    for (int64_t g = 0; g < group; ++g) {
      float* own = s.logits.data() + g * full;
      if (a.soft_cap > 0 && !a.index.signs)
        for (int64_t n = 0; n < full; ++n) own[n] = a.soft_cap * std::tanh(own[n] / a.soft_cap);
      const float sink = a.sinks ? a.sinks[head * group + g] : -std::numeric_limits<float>::infinity();
      const float peak = std::max(*std::max_element(own, own + full), sink);
      float sum = std::exp(sink - peak);
      for (int64_t n = 0; n < full; ++n) sum += own[n] = std::exp(own[n] - peak);
      for (int64_t n = 0; n < full; ++n) s.scores[n] += own[n] / sum;
    }
  }
}

// Brings the chosen blocks of one row into its room, and notes them.
ReachCounts fetch(const ReachArgs& a, int64_t row, Scratch& s) {
  ReachCounts counts{0, 0};
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
    ++counts.from_host;
    const int64_t place = std::find(held, held + a.rooms[row], block) - held;
    if (place == a.rooms[row]) continue;
    ++counts.in_room;
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
  }
  return counts;
}

// Names in the table what a row reads: blocks before `first`, chosen ones, blocks from `end` on.
void name(const ReachArgs& a, int64_t row) {
  const int32_t *written = written_of(a, row), *picked = a.picked + a.slots[row] * a.room;
  int32_t* out = a.out + a.out_rows[row] * a.out_stride;
  out = std::copy_n(written, a.first[row], out);
  out = std::copy_n(picked, a.chosen[row], out);
  std::copy(written + a.end[row], written + a.full[row] + 1, out);
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
                  chosen = a.chosen[row], room = a.rooms[row];
    if (full < 1 || full > a.width || full + 1 > a.written_width || first < 0 || first > end ||
        end > full || chosen < 0 || chosen > end - first || chosen > room || room > a.room ||
        first + room > full || first + chosen + full + 1 - end > a.out_width)
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

ReachCounts reach(const ReachArgs& a, BlockLogits block_logits, int threads) {
  check(a);
  int64_t from_host = 0, in_room = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && a.rows > 1) reduction(+ : from_host, in_room)
  {
    Scratch s;
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < a.rows; ++row) {
      if (!a.chooses[row]) {
        name(a, row);
        continue;
      }
      score(a, block_logits, row, s);
      s.order.resize(a.end[row] - a.first[row]);
      std::iota(s.order.begin(), s.order.end(), a.first[row]);
      // The best ones, of equal ones the oldest.
      std::partial_sort(s.order.begin(), s.order.begin() + a.chosen[row], s.order.end(),
                        [&](int32_t one, int32_t other) {
                          return s.scores[one] != s.scores[other] ? s.scores[one] > s.scores[other]
                                                                  : one < other;
                        });
      const ReachCounts counts = fetch(a, row, s);
      name(a, row);
      from_host += counts.from_host;
      in_room += counts.in_room;
    }
  }
  return {from_host, in_room};
}

}  // namespace vllm_evict

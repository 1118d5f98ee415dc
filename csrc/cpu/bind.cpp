// The Python module vllm_evict._C_cpu: checks shapes and dtypes, and passes raw
// pointers. vllm_evict/compute/kernels documents the functions.

#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "choose.h"
#include "compact.h"
#include "fold.h"
#include "mass.h"
#include "reach.h"
#include "view.h"

namespace vllm_evict::python {
namespace {

using at::Tensor;
using std::optional;
using std::string;

void require(bool valid, const char* sentence) {
  if (!valid) throw py::value_error(sentence);
}

void check_tensor(const Tensor& tensor, const char* name, at::ScalarType type, int64_t dims) {
  if (tensor.scalar_type() != type)
    throw py::type_error(string(name) + (type == at::kInt ? " must be int32" : " must be float32"));
  if (!tensor.is_cpu()) throw py::value_error(string(name) + " must be on the CPU");
  if (tensor.dim() != dims || (tensor.size(-1) > 1 && tensor.stride(-1) != 1))
    throw py::value_error(string(name) + " must be " + std::to_string(dims) +
                          "-dimensional, the last dimension contiguous");
}

optional<Type> type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Type::f32;
    case at::kBFloat16:
      return Type::bf16;
    case at::kHalf:
      return Type::f16;
    case at::kFloat8_e4m3fn:
      return Type::e4m3;
    case at::kFloat8_e5m2:
      return Type::e5m2;
    default:
      return {};
  }
}

Type check_floats(const Tensor& tensor, const char* name) {
  if (!tensor.is_cpu()) throw py::value_error(string(name) + " must be on the CPU");
  const optional<Type> type = type_of(tensor);
  if (!type || bytes_of(*type) == 1)
    throw py::type_error(string(name) + " must be float32, bfloat16 or float16");
  return *type;
}

Packing check_packing(const string& layout, const Tensor& keys) {
  require(keys.is_cpu(), "key_cache must be on the CPU");
  const optional<Type> type = type_of(keys);
  if (!type)
    throw py::type_error(
        "key_cache must be float32, bfloat16, float16, float8_e4m3fn or float8_e5m2");
  require(layout == "vec" || layout == "vec16" || layout == "amx",
          "layout must be one of vec, vec16, amx");
  if (layout == "amx" && type != Type::bf16 && bytes_of(*type) > 1)
    throw py::type_error("layout 'amx' packs bfloat16 and float8 keys only");
  return {*type, layout == "amx"};
}

string kernel_path(const optional<string>& isa) { return choose_kernel(isa).name; }

// A field of kernels.paged.PagedAttention. Python owns its tensor as long as the call lasts.
template <class T>
T field(const py::handle& attention, const char* name) {
  return attention.attr(name).cast<T>();
}

MassArgs check_attention(const py::handle& attention) {
  const auto query = field<Tensor>(attention, "query");
  const auto key_cache = field<Tensor>(attention, "key_cache");
  const auto block_table = field<Tensor>(attention, "block_table");
  const auto query_start_loc = field<Tensor>(attention, "query_start_loc");
  const auto seq_lens = field<Tensor>(attention, "seq_lens");
  const auto sinks = field<optional<Tensor>>(attention, "sinks");
  const auto mass = field<optional<Tensor>>(attention, "mass");
  const auto weights = field<optional<Tensor>>(attention, "weights");
  MassArgs a{};
  a.per_token = field<bool>(attention, "per_token");
  a.query_type = check_floats(query, "query");
  a.packing = check_packing(field<string>(attention, "layout"), key_cache);
  check_tensor(block_table, "block_table", at::kInt, 2);
  check_tensor(query_start_loc, "query_start_loc", at::kInt, 1);
  check_tensor(seq_lens, "seq_lens", at::kInt, 1);
  if (mass) check_tensor(*mass, "mass", at::kFloat, 3);
  if (weights) check_tensor(*weights, "weights", at::kFloat, 1);
  if (sinks) check_tensor(*sinks, "sinks", at::kFloat, 1);

  require(query.dim() == 3 && query.stride(2) == 1,
          "query must be [T, H, D] with a contiguous last dimension");
  require(
      key_cache.dim() == 4 && key_cache.stride(3) == 1 && key_cache.stride(2) == key_cache.size(3),
      "key_cache must be [num_blocks, Hkv, bs, D], contiguous within a block and head");
  require(key_cache.size(2) > 0 && key_cache.size(2) % 16 == 0 && key_cache.size(3) > 0 &&
              key_cache.size(3) % 2 == 0,
          "key_cache must have bs a multiple of 16 and an even D");
  require(query.size(2) == key_cache.size(3), "query and key_cache must have the same D");
  require(key_cache.size(1) > 0 && query.size(1) > 0 && query.size(1) % key_cache.size(1) == 0,
          "query must have a multiple of key_cache's heads");
  a.requests = seq_lens.size(0);
  require(block_table.size(0) == a.requests && (!mass || mass->size(0) == a.requests) &&
              query_start_loc.size(0) == a.requests + 1,
          "block_table, seq_lens and mass must have R rows, query_start_loc R + 1");
  require(!mass || mass->size(1) == 1 || mass->size(1) == key_cache.size(1),
          "mass must have one row for each KV head or one for all");
  require(!weights || weights->size(0) == query.size(0), "weights must have T elements");
  require(!sinks || sinks->size(0) == query.size(1), "sinks must have H elements");
  a.scale = static_cast<float>(field<double>(attention, "scale")) * unit_of(a.packing.type);
  a.value_scale =
      static_cast<float>(field<double>(attention, "value_scale")) * unit_of(a.packing.type);
  a.soft_cap = static_cast<float>(field<double>(attention, "soft_cap"));
  require(a.soft_cap >= 0, "soft_cap must be 0 (none) or positive");

  a.tokens = query.size(0);
  a.heads = query.size(1);
  a.dim = query.size(2);
  a.num_blocks = key_cache.size(0);
  a.kv_heads = key_cache.size(1);
  a.block_size = key_cache.size(2);
  a.query = query.const_data_ptr();
  a.query_token_stride = query.stride(0);
  a.query_head_stride = query.stride(1);
  a.keys = key_cache.const_data_ptr();
  a.key_block_stride = key_cache.stride(0);
  a.key_head_stride = key_cache.stride(1);
  a.table = block_table.const_data_ptr<int32_t>();
  a.table_stride = block_table.stride(0);
  a.table_width = block_table.size(1);
  a.starts = query_start_loc.const_data_ptr<int32_t>();
  a.lens = seq_lens.const_data_ptr<int32_t>();
  a.weights = weights ? weights->const_data_ptr<float>() : nullptr;
  if (mass) {
    a.out = mass->mutable_data_ptr<float>();
    a.out_request_stride = mass->stride(0);
    a.out_head_stride = mass->stride(1);
    a.out_width = mass->size(2);
    a.sum_heads = mass->size(1) == 1;
  }
  a.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  return a;
}

void block_mass(const py::handle& attention, const optional<string>& isa) {
  const MassArgs a = check_attention(attention);
  require(a.out, "block_mass needs mass");
  const Kernel& kernel = choose_kernel(isa);
  py::gil_scoped_release release;
  vllm_evict::block_mass(a, kernel, at::get_num_threads());
}

DecodeArgs check_decode(const py::handle& attention, const Tensor& rows, const Tensor& output) {
  DecodeArgs d{};
  d.mass = check_attention(attention);
  require(d.mass.dim % 16 == 0, "decode_mass needs D a multiple of 16");
  const auto query = field<Tensor>(attention, "query");
  const auto key_cache = field<Tensor>(attention, "key_cache");
  const auto value_cache = field<optional<Tensor>>(attention, "value_cache");
  require(value_cache.has_value(), "decode_mass needs value_cache");
  if (value_cache->scalar_type() != key_cache.scalar_type() ||
      output.scalar_type() != query.scalar_type())
    throw py::type_error("value_cache must have key_cache's dtype, output that of query");
  require(value_cache->is_cpu() && value_cache->sizes() == key_cache.sizes() &&
              value_cache->strides() == key_cache.strides(),
          "value_cache must have key_cache's shape and strides");
  require(output.is_cpu() && output.sizes() == query.sizes() && output.stride(2) == 1,
          "output must have query's shape and a contiguous last dimension");
  check_tensor(rows, "rows", at::kInt, 1);
  d.values = value_cache->const_data_ptr();
  d.rows = rows.const_data_ptr<int32_t>();
  d.num_rows = rows.size(0);
  d.output = output.mutable_data_ptr();
  d.output_token_stride = output.stride(0);
  d.output_head_stride = output.stride(1);
  return d;
}

void decode_classes(const std::vector<py::object>& attentions, const Tensor& rows,
                    const std::vector<Tensor>& outputs, const optional<string>& isa) {
  require(attentions.size() == outputs.size(), "outputs must have one entry for each class");
  std::vector<DecodeArgs> classes;
  for (size_t c = 0; c < attentions.size(); ++c)
    classes.push_back(check_decode(attentions[c], rows, outputs[c]));
  const Kernel& kernel = choose_kernel(isa);
  py::gil_scoped_release release;
  vllm_evict::decode_mass(classes, kernel, at::get_num_threads());
}

void compact(const std::vector<Tensor>& caches, const Tensor& source, const Tensor& keep,
             const Tensor& target, const optional<Tensor>& starts, const string& layout,
             const optional<string>& isa) {
  require(!caches.empty(), "caches must hold at least one layer");
  const Tensor& one = caches.front();
  CompactArgs a{};
  a.item_bytes = one.element_size();
  for (const Tensor& cache : caches) {
    if (cache.scalar_type() != one.scalar_type() ||
        (a.item_bytes != 1 && a.item_bytes != 2 && a.item_bytes != 4))
      throw py::type_error("caches must have one dtype, of 1, 2 or 4 bytes");
    require(cache.is_cpu() && cache.dim() == 4 && cache.sizes() == one.sizes() &&
                cache.size(2) % 2 == 0 && cache.stride(3) == 1 && cache.stride(2) == cache.size(3),
            "caches must be [num_blocks, Hkv, 2 * bs, D] of one shape, contiguous within a block "
            "and head");
    a.layers.push_back({static_cast<char*>(cache.mutable_data_ptr()),
                        cache.stride(0) * a.item_bytes, cache.stride(1) * a.item_bytes});
  }
  a.num_blocks = one.size(0);
  a.kv_heads = one.size(1);
  a.block_size = one.size(2) / 2;
  a.dim = one.size(3);
  require(a.block_size > 0 && a.dim > 0 && a.kv_heads > 0, "caches must not be empty");
  require(layout == "vec" || layout == "vec16" || layout == "amx",
          "layout must be one of vec, vec16, amx");
  a.amx = layout == "amx";
  if (a.amx && a.item_bytes != 1 && one.scalar_type() != at::kBFloat16)
    throw py::type_error("layout 'amx' packs caches of bfloat16 or of 1 byte only");
  require(!a.amx || (a.block_size % 16 == 0 && a.dim % 16 == 0),
          "layout 'amx' needs bs and D that are multiples of 16");
  check_tensor(source, "source", at::kInt, 1);
  check_tensor(target, "target", at::kInt, 1);
  check_tensor(keep, "keep", at::kInt, 3);
  const int64_t layers = caches.size();
  require((keep.size(0) == 1 || keep.size(0) == layers) && keep.size(1) == a.kv_heads,
          "keep must be [L or 1, Hkv, kept]");
  a.sources = source.size(0);
  a.kept = keep.size(2);
  a.targets = target.size(0);
  a.source = source.const_data_ptr<int32_t>();
  a.target = target.const_data_ptr<int32_t>();
  a.keep = keep.const_data_ptr<int32_t>();
  a.keep_layer_stride = keep.size(0) == 1 ? 0 : keep.stride(0);
  a.keep_head_stride = keep.stride(1);
  const int32_t whole[] = {0, static_cast<int32_t>(a.sources), 0, static_cast<int32_t>(a.kept),
                           0, static_cast<int32_t>(a.targets)};
  a.requests = 1;
  const int32_t* first = whole;
  int64_t stride = 2;
  if (starts) {
    check_tensor(*starts, "starts", at::kInt, 2);
    require(starts->size(0) == 3 && starts->size(1) > 0, "starts must be [3, R + 1]");
    first = starts->const_data_ptr<int32_t>();
    stride = starts->stride(0);
    a.requests = starts->size(1) - 1;
  }
  a.source_starts = first;
  a.keep_starts = first + stride;
  a.target_starts = first + 2 * stride;
  const MoveRows* moves = choose_moves(isa);
  py::gil_scoped_release release;
  vllm_evict::compact(a, moves, at::get_num_threads());
}

void fold(const Tensor& sums, const Tensor& slots, const Tensor& mass, const Tensor& logical,
          const optional<Tensor>& kept) {
  check_tensor(sums, "sums", at::kFloat, 3);
  check_tensor(slots, "slots", at::kInt, 1);
  check_tensor(mass, "mass", at::kFloat, 3);
  check_tensor(logical, "logical", at::kInt, 2);
  if (kept) check_tensor(*kept, "kept", at::kFloat, 1);
  FoldArgs a{};
  a.requests = mass.size(0);
  a.heads = mass.size(1);
  a.width = mass.size(2);
  require(sums.size(1) == a.heads && logical.size(1) == a.width,
          "sums must have mass' heads, and logical its width");
  require(slots.size(0) == a.requests && logical.size(0) == a.requests &&
              (!kept || kept->size(0) == a.requests),
          "slots, mass, logical and kept must have the same number of rows");
  a.sums = sums.mutable_data_ptr<float>();
  a.sum_slot_stride = sums.stride(0);
  a.sum_head_stride = sums.stride(1);
  a.slots = sums.size(0);
  a.blocks = sums.size(2);
  a.slot_of = slots.const_data_ptr<int32_t>();
  a.mass = mass.const_data_ptr<float>();
  a.mass_request_stride = mass.stride(0);
  a.mass_head_stride = mass.stride(1);
  a.logical = logical.const_data_ptr<int32_t>();
  a.logical_stride = logical.stride(0);
  a.kept = kept ? kept->const_data_ptr<float>() : nullptr;
  py::gil_scoped_release release;
  vllm_evict::fold(a);
}

void resident_view(const Tensor& block_table, const Tensor& seq_lens, int64_t block_size,
                   const Tensor& out_table, const Tensor& out_lens,
                   const optional<Tensor>& out_logical) {
  check_tensor(block_table, "block_table", at::kInt, 2);
  check_tensor(seq_lens, "seq_lens", at::kInt, 1);
  check_tensor(out_table, "out_table", at::kInt, 2);
  check_tensor(out_lens, "out_lens", at::kInt, 1);
  if (out_logical) check_tensor(*out_logical, "out_logical", at::kInt, 2);
  ViewArgs a{};
  a.requests = seq_lens.size(0);
  require(block_size > 0, "block_size must be positive");
  require(block_table.size(0) == a.requests && out_table.size(0) == a.requests &&
              out_lens.size(0) == a.requests &&
              (!out_logical || out_logical->size(0) == a.requests),
          "block_table, seq_lens and the outputs must have the same number of rows");
  a.table = block_table.const_data_ptr<int32_t>();
  a.table_stride = block_table.stride(0);
  a.table_width = block_table.size(1);
  a.lens = seq_lens.const_data_ptr<int32_t>();
  a.block_size = block_size;
  a.out_table = out_table.mutable_data_ptr<int32_t>();
  a.out_stride = out_table.stride(0);
  a.out_width = out_table.size(1);
  a.out_lens = out_lens.mutable_data_ptr<int32_t>();
  if (out_logical) {
    a.out_logical = out_logical->mutable_data_ptr<int32_t>();
    a.logical_stride = out_logical->stride(0);
    a.logical_width = out_logical->size(1);
  }
  py::gil_scoped_release release;
  vllm_evict::resident_view(a, at::get_num_threads());
}

const int32_t* check_ints(const py::handle& rows, const char* name, at::IntArrayRef sizes) {
  const auto tensor = field<Tensor>(rows, name);
  if (tensor.scalar_type() != at::kInt) throw py::type_error(string(name) + " must be int32");
  if (!tensor.is_cpu() || !tensor.is_contiguous() || tensor.sizes() != sizes)
    throw py::value_error(string(name) + " must be contiguous, with a row for each request");
  return tensor.const_data_ptr<int32_t>();
}

void reach(const py::handle& rows, const Tensor& query, const Tensor& index, const Tensor& numbers,
           const Tensor& held, const Tensor& read, const Tensor& picked, const Tensor& scores,
           const Tensor& counts, const Tensor& cache, const Tensor& host, const Tensor& table,
           double scale, double soft_cap, const optional<Tensor>& sinks, int64_t step, int64_t fetch,
           bool leads, const optional<string>& isa) {
  ReachArgs a{};
  a.query_type = check_floats(query, "query");
  a.index.kind = index.scalar_type() == at::kByte    ? Kind::codes
                 : index.scalar_type() == at::kShort ? Kind::signs
                                                     : Kind::boxes;
  if (a.index.kind == Kind::boxes) a.index.type = check_floats(index, "index");
  require(query.dim() == 3 && query.stride(2) == 1 && index.dim() == 3 && index.is_contiguous() &&
              index.is_cpu() && query.size(1) % index.size(1) == 0 && query.size(2) % 16 == 0,
          "query must be [T, H, D], D a multiple of 16, and index contiguous, [n, Hkv, X]");
  a.index.width = index.size(2);
  a.dim = query.size(2);
  a.index.block_size = a.index.kind == Kind::codes   ? coded_tokens(a.index.width, a.dim)
                       : a.index.kind == Kind::signs ? (a.index.width - a.dim) / (a.dim / 16 + 1)
                                                     : a.index.width / (2 * a.dim) * 32;
  require(a.index.width == (a.index.kind == Kind::codes   ? coded_bytes(a.index.block_size, a.dim)
                            : a.index.kind == Kind::signs ? a.dim + a.index.block_size * (a.dim / 16 + 1)
                                                          : a.index.width / (2 * a.dim) * 2 * a.dim) &&
              a.index.block_size > 0 && (a.index.kind == Kind::boxes || a.index.block_size % 16 == 0),
          "index must have numbers of boxes, of signs or of codes");
  const auto written = field<Tensor>(rows, "written"), queries = field<Tensor>(rows, "queries");
  for (auto [tensor, name] : {std::pair{&numbers, "numbers"}, {&held, "held"}, {&read, "read"},
                              {&picked, "picked"}, {&counts, "counts"}, {&table, "table"},
                              {&written, "written"}})
    check_tensor(*tensor, name, at::kInt, 2);
  require(numbers.is_contiguous() && held.is_contiguous() && read.is_contiguous() &&
              picked.is_contiguous() && held.sizes() == read.sizes() &&
              held.sizes() == picked.sizes() && held.size(0) == numbers.size(0) &&
              counts.is_contiguous() && counts.size(0) == numbers.size(0) && counts.size(1) == 3,
          "numbers, held, read, picked and counts must be contiguous, with a row for each slot");
  check_tensor(scores, "scores", at::kFloat, 2);
  require(scores.is_contiguous() && scores.sizes() == numbers.sizes() && fetch >= 0,
          "scores must be contiguous and as wide as numbers, and fetch at least 0");
  require(cache.is_cpu() && host.is_cpu() && cache.scalar_type() == host.scalar_type() &&
              cache.dim() == host.dim() && cache.dim() > 1 &&
              cache.sizes().slice(1) == host.sizes().slice(1) && cache[0].is_contiguous() &&
              host.is_contiguous(),
          "cache and host must have pages of one shape and dtype, each contiguous");
  if (sinks) check_tensor(*sinks, "sinks", at::kFloat, sinks->dim() == 2 ? 2 : 1);
  require(!sinks || (sinks->is_contiguous() && sinks->size(-1) == query.size(1) &&
                     (sinks->dim() == 1 || sinks->size(0) == query.size(0))),
          "sinks must have H elements, or [T, H]");
  a.rows = queries.numel();
  for (auto [to, name] : {std::pair{&a.queries, "queries"}, {&a.query_counts, "query_counts"},
                          {&a.full, "full"}, {&a.blocks, "blocks"}, {&a.first, "first"}, {&a.end, "end"},
                          {&a.chosen, "chosen"}, {&a.rooms, "rooms"}, {&a.slots, "slots"},
                          {&a.out_rows, "out_rows"}, {&a.chooses, "chooses"}})
    *to = check_ints(rows, name, {a.rows});
  a.written = written.const_data_ptr<int32_t>();
  a.written_stride = written.stride(0);
  a.written_width = written.size(1);
  a.numbers = numbers.const_data_ptr<int32_t>();
  a.width = numbers.size(1);
  a.pool = field<int64_t>(rows, "pool");
  for (int64_t row = 0; row < a.rows; ++row)
    require(a.queries[row] >= 0 && a.query_counts[row] > 0 &&
                a.queries[row] + a.query_counts[row] <= query.size(0),
            "queries must be tokens of query");
  a.query = query.const_data_ptr();
  a.query_token_stride = query.stride(0);
  a.query_head_stride = query.stride(1);
  a.heads = query.size(1);
  a.index.data = index.const_data_ptr();
  a.index.blocks = index.size(0);
  a.index.kv_heads = index.size(1);
  a.scale = static_cast<float>(scale);
  a.soft_cap = static_cast<float>(soft_cap);
  a.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  a.sink_stride = sinks && sinks->dim() == 2 ? sinks->size(1) : 0;
  a.held = held.mutable_data_ptr<int32_t>();
  a.read = read.mutable_data_ptr<int32_t>();
  a.picked = picked.mutable_data_ptr<int32_t>();
  a.scores = scores.mutable_data_ptr<float>();
  a.counts = counts.mutable_data_ptr<int32_t>();
  a.fetch = fetch;
  a.leads = leads;
  a.num_slots = held.size(0);
  a.room = held.size(1);
  a.step = static_cast<int32_t>(step);
  a.cache = static_cast<char*>(cache.mutable_data_ptr());
  a.cache_stride = cache.stride(0) * cache.element_size();
  a.cache_pages = cache.size(0);
  a.host = static_cast<const char*>(host.const_data_ptr());
  a.host_stride = host.stride(0) * host.element_size();
  a.host_pages = host.size(0);
  a.page_bytes = cache[0].nbytes();
  a.out = table.mutable_data_ptr<int32_t>();
  a.out_stride = table.stride(0);
  a.num_out_rows = std::min(table.size(0), written.size(0));
  a.out_width = table.size(1);
  const ReachKernel& kernel = choose_reach(isa);
  py::gil_scoped_release release;
  vllm_evict::reach(a, kernel, at::get_num_threads());
}

// Copies blocks of one tensor of pages into another one, where `to` is not negative.
void copy_blocks(const Tensor& target, const Tensor& source, const Tensor& to, const Tensor& of) {
  check_tensor(to, "to", at::kInt, 1);
  check_tensor(of, "of", at::kInt, 1);
  require(target.is_cpu() && source.is_cpu() && target.scalar_type() == source.scalar_type() && target.dim() > 1 &&
              target.sizes().slice(1) == source.sizes().slice(1) && target[0].is_contiguous() &&
              source[0].is_contiguous(),
          "target and source must have pages of one shape and dtype, each contiguous");
  require(to.is_contiguous() && of.is_contiguous() && to.numel() == of.numel(), "to and of must be [n], contiguous");
  const int32_t *there = to.const_data_ptr<int32_t>(), *here = of.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < to.numel(); ++i)
    require(there[i] < target.size(0) && (there[i] < 0 || (here[i] >= 0 && here[i] < source.size(0))),
            "to and of must be blocks of target and source");
  const int64_t size = target.element_size(), bytes = target[0].nbytes();
  auto* out = static_cast<char*>(target.mutable_data_ptr());
  const auto* from = static_cast<const char*>(source.const_data_ptr());
  const int64_t out_stride = target.stride(0) * size, stride = source.stride(0) * size;
  py::gil_scoped_release release;
  at::parallel_for(0, to.numel(), 1 + (1 << 18) / std::max<int64_t>(bytes, 1), [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i)
      if (there[i] >= 0) std::memcpy(out + there[i] * out_stride, from + here[i] * stride, bytes);
  });
}

// Writes what stands for the keys of blocks into an index of `type`, by `store` of one head of one.
template <class Number, class Store>
void store_index(const Tensor& index, const Tensor& blocks, const Tensor& keys, at::ScalarType type, int64_t width,
                 Store store) {
  check_tensor(index, "index", type, 3);
  const int64_t heads = keys.size(1), tokens = keys.size(2), dim = keys.size(3);
  require(index.is_contiguous() && keys.is_contiguous() && blocks.is_contiguous() && keys.size(0) == blocks.numel() &&
              index.size(1) == heads && tokens % 16 == 0 && dim % 16 == 0 && index.size(2) == width,
          "keys must be [n, Hkv, block_size, D], multiples of 16 tokens and dimensions, and index [N, Hkv, X], contiguous");
  const int64_t* to = blocks.const_data_ptr<int64_t>();
  require(std::all_of(to, to + blocks.numel(), [&](int64_t block) { return block >= 0 && block < index.size(0); }),
          "blocks must be in the index");
  const float* from = keys.const_data_ptr<float>();
  auto* all = static_cast<Number*>(index.mutable_data_ptr());
  py::gil_scoped_release release;
  at::parallel_for(0, keys.size(0) * heads, 16, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i)
      store(from + i * tokens * dim, dim, tokens, all + (to[i / heads] * heads + i % heads) * width);
  });
}

void check_keys(const Tensor& blocks, const Tensor& keys) {
  check_tensor(blocks, "blocks", at::kLong, 1);
  check_tensor(keys, "keys", at::kFloat, 4);
}

void store_signs(const Tensor& index, const Tensor& blocks, const Tensor& keys, const optional<string>& isa) {
  check_keys(blocks, keys);
  const int64_t width = keys.size(3) + keys.size(2) * (keys.size(3) / 16 + 1);
  store_index<uint16_t>(index, blocks, keys, at::kShort, width, choose_reach(isa).signs);
}

void store_codes(const Tensor& index, const Tensor& blocks, const Tensor& keys, const optional<string>& isa) {
  check_keys(blocks, keys);
  store_index<uint8_t>(index, blocks, keys, at::kByte, coded_bytes(keys.size(2), keys.size(3)), choose_reach(isa).codes);
}

}  // namespace
}  // namespace vllm_evict::python

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace vllm_evict::python;
  module.def("block_mass", block_mass);
  module.def("compact", compact);
  module.def("copy_blocks", copy_blocks);
  module.def("decode_classes", decode_classes);
  module.def("fold", fold);
  module.def("kernel_path", kernel_path);
  module.def("reach", vllm_evict::python::reach);
  module.def("resident_view", resident_view);
  module.def("store_codes", store_codes);
  module.def("store_signs", store_signs);
}

// Attention mass per KV block or token: what the scheduler (mass.cpp) and the kernels
// (mass_kernel.h, compiled once per instruction set) tell each other.
#pragma once

#include <cstdint>
#include <vector>

namespace vllm_evict {

enum class Type { f32, bf16, f16 };

// How a block's keys are stored: "vec" of some type, or "amx" (bfloat16).
enum class Packing { f32, bf16, f16, amx };

// One call of block_mass or decode_mass. Strides count elements.
struct MassArgs {
  const void* query;  // [tokens, heads, dim]
  Type query_type;
  int64_t query_token_stride, query_head_stride;
  const void* keys;  // [blocks, kv_heads, block_size * dim]
  Packing packing;
  int64_t key_block_stride, key_head_stride;
  const int32_t* table;  // [requests, >= blocks of the request]
  int64_t table_stride, table_width;
  const int32_t* starts;  // [requests + 1]
  const int32_t* lens;    // [requests]
  const float* weights;   // [tokens] or null
  float* out;             // [requests, kv_heads or 1, >= entries of the request]
  int64_t out_request_stride, out_head_stride, out_width;
  bool sum_heads;  // out has one row for all KV heads
  bool per_token;  // out's entries are tokens; blocks otherwise
  float scale;
  int64_t requests, tokens, heads, kv_heads, dim, block_size, num_blocks;
};

// Query rows (a token and a head each) that read the same keys, in the order of
// their tokens. `q` holds groups of Kernel::rows rows: floats [dim, rows of the
// group], or words of two bfloat16 [dim / 2, rows of the group] if `pairs`.
struct Rows {
  const void* q;
  bool pairs;
  float scale;           // of q * k, to make exp2(score) the softmax weight
  const int32_t* seen;   // tokens that each row sees, ascending
  const float* weights;  // of each row, zeros up to a multiple of kRowAlign
  int64_t count;
};

// The blocks of one request under one KV head.
struct Blocks {
  const void* keys;  // block 0, this head
  Packing packing;
  int64_t stride, size, dim;
  const int32_t* table;
};

// Split softmax statistics of each row over each tile of tokens:
// mass = sum(exp2(score - peak)), both [tile, stride] with a column per row. Where mass is wanted
// of each token, `powers` keeps the terms: [tile, power_rows, tokens of a tile].
struct Tiles {
  float* peak;
  float* mass;
  int64_t stride;      // multiple of kRowAlign
  float* powers;       // or null; where a row does not see the tile, anything
  int64_t power_rows;  // at least the rows, the last group padded
};

// Attention of rows that see the same tokens, so far: output = sums / mass.
struct Output {
  const void* values;  // block 0, this head: [block_size, dim], where and of the type the keys are
  float* sums;         // [rows up to Kernel::padded, dim]
  float* peak;         // [rows], and room for kRowAlign more
  float* mass;
};

constexpr int64_t kRowAlign = 16;
constexpr float kUnseen = -1e30f;  // peak of a tile, of mass 0, that a row does not see

struct Kernel {
  const char* name;
  int64_t rows;     // rows scored together
  bool dots_pairs;  // takes Rows::pairs where queries and keys are bfloat16
  // Tokens in a tile; divides block_size.
  int64_t (*tile_tokens)(int64_t block_size);
  // Rows that a group of `count` <= rows takes in Rows::q.
  int64_t (*padded)(int64_t count);
  // Statistics of the tiles of blocks [begin, end).
  void (*score)(const Rows&, const Blocks&, int64_t begin, int64_t end, const Tiles&);
  // Attention to blocks [begin, end); their statistics too, if there are `tiles` (not for amx).
  void (*attend)(const Rows&, const Blocks&, int64_t begin, int64_t end, const Tiles&,
                 const Output&);
  // out[block] += sum over rows of weight * softmax mass; consumes the tiles.
  void (*fold)(const Rows&, int64_t block_size, int64_t num_blocks, const Tiles&, float* out);
  // The same for each token of the blocks, from the tiles' powers.
  void (*fold_tokens)(const Rows&, int64_t block_size, int64_t num_blocks, const Tiles&,
                      float* out);
};

// Null where the compiler or the architecture lacks the instruction set.
extern const Kernel* const avx512_bf16_kernel;
extern const Kernel* const avx512_kernel;
extern const Kernel* const avx2_kernel;
extern const Kernel* const portable_kernel;

// One class of heads of decode_mass, or all: what is written beside the mass. `keys` and `values`
// share their strides.
struct DecodeArgs {
  MassArgs mass;        // out: null where no mass is wanted
  const void* values;   // [blocks, kv_heads, block_size, dim]
  const int32_t* rows;  // [num_rows], requests of one token each
  int64_t num_rows;
  void* output;  // [tokens, heads, dim], of the query's type
  int64_t output_token_stride, output_head_stride;
};

// The same bits for any number of threads. Both throw std::invalid_argument where
// a start, length or block id is out of range, before anything is written.
void block_mass(const MassArgs&, const Kernel&, int threads);
void decode_mass(const std::vector<DecodeArgs>& classes, const Kernel&, int threads);

}  // namespace vllm_evict

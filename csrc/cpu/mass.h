// Attention mass of each block or token: the interface between mass.cpp, which divides the work, and the
// kernels (mass_kernel.h, compiled once for each instruction set).
#pragma once

#include <cstdint>
#include <vector>

namespace vllm_evict {

// Types of elements. Caches alone have the last two, float8_e4m3fn and float8_e5m2.
enum class Type { f32, bf16, f16, e4m3, e5m2 };

constexpr int64_t bytes_of(Type type) {
  return type == Type::f32 ? 4 : type == Type::e4m3 || type == Type::e5m2 ? 1 : 2;
}

// What an element stands for, in the unit that kernels read it in. They read e4m3 as the float16 of its
// bits, whose exponent has a bias of 15 where e4m3's has 7. Scales of keys and values have the factor.
constexpr float unit_of(Type type) { return type == Type::e4m3 ? 256.f : 1.f; }

// Packing of a block's keys and values: "vec", or "amx" of elements of up to 2 bytes.
struct Packing {
  Type type;
  bool amx;
};

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
  bool per_token;  // entries of out are tokens instead of blocks
  float scale;         // of products, with that of quantised keys
  float value_scale;   // of quantised values
  float soft_cap;      // of scores: soft_cap * tanh(score / soft_cap); 0: none
  const float* sinks;  // [heads], logits that belong to no token, or null
  int64_t requests, tokens, heads, kv_heads, dim, block_size, num_blocks;
};

// How Rows::q holds queries. In groups of Kernel::rows rows: floats [dim, rows of the group], or
// words of two bfloat16 [dim / 2, rows of the group]. Or bfloat16 [rows up to a multiple of
// kTileRows, dim].
enum class Queries { floats, pairs, tiles };

// Query rows (a token and a head each) that read the same keys, in the order of their tokens.
struct Rows {
  const void* q;
  Queries queries;
  float scale;           // of q * k, to make exp2(score) the softmax weight
  float soft_cap;        // of scaled scores; 0: none
  const int32_t* seen;   // tokens that each row sees, ascending
  const float* weights;  // of each row, zeros up to a multiple of kRowAlign
  const float* sinks;    // of each row, scaled as scores are, up to the same multiple; or null
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
// mass = sum(exp2(score - peak)), both [tile, stride] with a column for each row. For mass by token
// `powers` keeps the terms: [tile, power_rows, tokens of a tile].
struct Tiles {
  float* peak;
  float* mass;
  int64_t stride;      // multiple of kRowAlign
  float* powers;       // or null; undefined for rows that do not see the tile
  int64_t power_rows;  // at least the number of rows, with the last group padded
};

// Attention so far of rows: output = sums / mass.
struct Output {
  const void* values;  // block 0, this head, of the keys' type, packing and strides
  float* sums;         // [rows up to Kernel::padded, dim]
  float* peak;         // [rows + kRowAlign]
  float* mass;
};

constexpr int64_t kRowAlign = 16;
constexpr int64_t kTileRows = 32;  // of two registers of AMX
constexpr float kUnseen = -1e30f;  // peak of a tile that a row does not see; its mass is 0

struct Kernel {
  const char* name;
  int64_t rows;     // rows scored together
  bool dots_pairs;  // takes Queries::pairs if queries and keys are bfloat16
  bool dots_tiles;  // score() takes Queries::tiles if keys are packed for them
  // Tokens in a tile; divides block_size.
  int64_t (*tile_tokens)(int64_t block_size);
  // Rows that a group of `count` <= rows takes in Rows::q.
  int64_t (*padded)(int64_t count);
  // Statistics of the tiles of blocks [begin, end).
  void (*score)(const Rows&, const Blocks&, int64_t begin, int64_t end, const Tiles&);
  // Attends to blocks [begin, end), and stores statistics if there are `tiles`.
  void (*attend)(const Rows&, const Blocks&, int64_t begin, int64_t end, const Tiles&,
                 const Output&);
  // out[block] += sum over rows of weight * softmax mass; consumes the tiles.
  void (*fold)(const Rows&, int64_t block_size, int64_t num_blocks, const Tiles&, float* out);
  // The same by token, from the tiles' powers.
  void (*fold_tokens)(const Rows&, int64_t block_size, int64_t num_blocks, const Tiles&,
                      float* out);
};

// Null if the compiler or the architecture lacks the instruction set.
extern const Kernel* const amx_bf16_kernel;
extern const Kernel* const avx512_bf16_kernel;
extern const Kernel* const avx512_kernel;
extern const Kernel* const avx2_kernel;
extern const Kernel* const portable_kernel;

// Arguments of decode_mass for one class of heads, or for all. `keys` and `values` have the same strides.
struct DecodeArgs {
  MassArgs mass;        // out is null for no mass
  const void* values;   // [blocks, kv_heads, block_size * dim]
  const int32_t* rows;  // [num_rows], requests
  int64_t num_rows;
  void* output;  // [tokens, heads, dim], of the query's type
  int64_t output_token_stride, output_head_stride;
};

// The same bits for any number of threads. They throw std::invalid_argument, before they write
// anything, if a start, length or block id is out of range.
void block_mass(const MassArgs&, const Kernel&, int threads);
// Attends for requests of any number of tokens.
void decode_mass(const std::vector<DecodeArgs>& classes, const Kernel&, int threads);
// The part of decode_mass that attends for the requests of several tokens, in one class. decode_mass
// has checked `rows`.
void prompt_mass(const DecodeArgs&, const Kernel&, int threads);

}  // namespace vllm_evict

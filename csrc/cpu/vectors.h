// Vectors of LANES floats, and elements in memory that become such vectors. mass_layouts.h and
// reach_kernel.h include it; mass_kernel.h says which names have to be defined before.

#pragma once

#include <cstdint>

namespace vllm_evict::ISA {
namespace {

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef uint32_t WordVec __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * LANES)));
typedef int16_t ShortVec __attribute__((vector_size(2 * LANES)));
typedef int16_t PairVec __attribute__((vector_size(4 * LANES)));
typedef int8_t CharVec __attribute__((vector_size(4 * LANES)));
typedef uint8_t ByteVec __attribute__((vector_size(LANES)));
typedef int8_t LowVec __attribute__((vector_size(LANES)));

template <class V>
inline V load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

template <class V>
inline void store(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

inline Vec splat(float x) { return x - Vec{}; }

// Elements in memory. widen() makes floats of LANES of them.

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct E4m3 {
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
};

inline HalfVec widen_bytes(const void* from) {
#ifdef WIDEN_U8
  return (HalfVec)WIDEN_U8(from);
#else
  return __builtin_convertvector(load<ByteVec>(from), HalfVec);
#endif
}

inline WordVec widen_words(HalfVec words) {
#ifdef WIDEN_U16
  return (WordVec)WIDEN_U16(words);
#else
  return __builtin_convertvector(words, WordVec);
#endif
}

inline Vec widen_f16(HalfVec words) {
#ifdef WIDEN_F16
  return (Vec)WIDEN_F16(words);
#else
  const WordVec bits = widen_words(words);
  const WordVec sign = (bits & 0x8000) << 16;
  // The exponents' biases differ by 112. The product is exact for subnormals too.
  const Vec finite = (Vec)((bits & 0x7fff) << 13) * 0x1p112f;
  const WordVec special = (bits & 0x7c00) == 0x7c00 ? WordVec{} + 0x7f800000 : WordVec{};
  return (Vec)((WordVec)finite | special | sign);
#endif
}

// Bytes of fp8 in the upper halves of words, as float16 in the unit of unit_of(). NaN of e4m3 becomes
// finite, 480, as in vLLM's kernels.
inline HalfVec to_f16(HalfVec upper, const E4m3*) {
  return (HalfVec)((ShortVec)upper >> 1) & 0xbf80;
}
inline HalfVec to_f16(HalfVec upper, const E5m2*) { return upper; }

inline Vec widen(const float* from) { return load<Vec>(from); }

inline Vec widen(const Bf16* from) { return (Vec)(widen_words(load<HalfVec>(from)) << 16); }

inline Vec widen(const F16* from) { return widen_f16(load<HalfVec>(from)); }

template <class Fp8>
inline Vec widen(const Fp8* from) {
  return widen_f16(to_f16(widen_bytes(from) << 8, from));
}

// ---- Bytes

// 16 bytes, which a vector of their places picks from. The last 8 are the first ones with the other sign, in reverse.
struct Table {
#ifdef LOOK_UP
  explicit Table(const int8_t* from) : bytes((CharVec)SPREAD(from)) {}
  CharVec operator[](CharVec places) const { return (CharVec)LOOK_UP(bytes, places); }
  CharVec bytes;
#else
  explicit Table(const int8_t* from) : bytes(from) {}
  CharVec operator[](CharVec places) const {
    const CharVec upper = places > 7, lower = places ^ (upper & 15);
    CharVec picked{};
    for (int8_t place = 0; place < 8; ++place) picked |= (lower == place) & (CharVec{} + bytes[place]);
    return (picked ^ upper) - upper;
  }
  const int8_t* bytes;
#endif
};

// Products / 2^15, rounded, halves up.
inline PairVec multiply_round(PairVec a, PairVec b) {
#ifdef MULTIPLY_ROUND
  return (PairVec)MULTIPLY_ROUND(a, b);
#else
  const IntVec even = ((IntVec)a << 16 >> 16) * ((IntVec)b << 16 >> 16), odd = ((IntVec)a >> 16) * ((IntVec)b >> 16);
  return (PairVec)(((even + 0x4000) >> 15 & 0xffff) | (odd + 0x4000) >> 15 << 16);
#endif
}

// LANES bytes as floats, and the lowest bytes of words.
inline Vec of_bytes(const uint8_t* from) {
#ifdef WIDEN_BYTES
  return __builtin_convertvector((IntVec)WIDEN_BYTES(from), Vec);
#else
  return __builtin_convertvector(__builtin_convertvector(load<ByteVec>(from), IntVec), Vec);
#endif
}
inline Vec of_bytes(const int8_t* from) {
#ifdef WIDEN_CHARS
  return __builtin_convertvector((IntVec)WIDEN_CHARS(from), Vec);
#else
  return __builtin_convertvector(__builtin_convertvector(load<LowVec>(from), IntVec), Vec);
#endif
}
inline LowVec low_bytes(Vec words) {
#ifdef NARROW
  return (LowVec)NARROW(words);
#else
  return __builtin_convertvector((IntVec)words, LowVec);
#endif
}

// Of each word the sum, and the products of its four bytes of `a`, which are 0 to 3, with those of `b`, which have a sign.
inline IntVec dot_bytes(IntVec sum, WordVec a, WordVec b) {
#ifdef DOT_BYTES
  return DOT_BYTES(sum, a, b);
#else
  for (int i = 0; i < 32; i += 8) sum += (IntVec)(a >> i & 0xff) * ((IntVec)(b << (24 - i)) >> 24);
  return sum;
#endif
}

inline PairVec max(PairVec a, PairVec b) { return a > b ? a : b; }

// ---- Numbers

// Of 16 numbers those at places, of which the lowest four bits count.
inline Vec pick(const float* from, WordVec places) {
#ifdef PICK
  return (Vec)PICK(from, places);
#else
  Vec picked;
  for (int i = 0; i < LANES; ++i) picked[i] = from[places[i] & 15];
  return picked;
#endif
}

// Returns b if one of the two is NaN.
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

// Adding this rounds floats of up to 2^22 to whole numbers, which are the lowest bits of the sum. 1.5 * 2^23.
constexpr float kWhole = 12582912.f;
constexpr float kLog2e = 1.44269504f;

// 2^x for x <= 0, at most 1.3 ulp off; 0 below 2^-126, NaN for NaN.
inline Vec exp2(Vec x) {
  const Vec round = splat(12582912.f);  // 1.5 * 2^23
  const Vec whole = x + round;
  const Vec part = x - (whole - round);
  Vec p = part * 0.0013264728f + 0.0096715139f;
  p = p * part + 0.0555073358f;
  p = p * part + 0.2402224243f;
  p = p * part + 0.6931470037f;
  p = p * part + 1.f;
  p = (Vec)((WordVec)p + ((WordVec)whole << 23));
  return x <= -126.f ? Vec{} : p;
}

// cap * tanh(x / cap), exact to a few ulp of cap; NaN for NaN.
inline Vec soft_capped(Vec x, float cap) {
  const WordVec sign = (WordVec)x & 0x80000000u;
  const Vec magnitude = (Vec)((WordVec)x & 0x7fffffffu);
  const Vec small = exp2(magnitude * (-2.88539008f / cap));  // e^(-2 |x| / cap)
  const Vec tanh = (1.f - small) / (1.f + small);
  return (Vec)((WordVec)(cap * tanh) | sign);
}

template <int... I>
struct Indices {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
  typedef Indices<I...> Type;
};
typedef Count<LANES>::Type Lanes;

template <int... I>
inline IntVec lane_numbers(Indices<I...>) {
  return IntVec{I...};
}

// The other half of each 2 * half numbers.
inline Vec swapped(Vec v, int half) {
#ifdef PICK
  return __builtin_shuffle(v, lane_numbers(Lanes{}) ^ half);
#else
  Vec other;
  for (int i = 0; i < LANES; ++i) other[i] = v[i ^ half];
  return other;
#endif
}
inline float sum_of(Vec v) {
#pragma GCC unroll 4
  for (int half = LANES / 2; half; half /= 2) v += swapped(v, half);
  return v[0];
}
// Any of them if one is NaN.
inline float largest_of(Vec v) {
#pragma GCC unroll 4
  for (int half = LANES / 2; half; half /= 2) v = max(v, swapped(v, half));
  return v[0];
}

}  // namespace
}  // namespace vllm_evict::ISA

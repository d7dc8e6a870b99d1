// Values of one byte as vectors of floats: signed integers, and floats of 8 bits. Every variant gives the same bits.
#pragma once

#include <type_traits>

#include "simd/vec.h"

namespace cardan_native {

typedef uint8_t vb __attribute__((vector_size(kLanes)));
typedef int8_t vsb __attribute__((vector_size(kLanes)));

// An integer, as a type of this namespace, so that its overloads are found in templates that were written before them.
struct i8 {
  int8_t bits;
};

// The largest value of each type.
template <class T>
inline constexpr float kLargest = 0.0f;
template <>
inline constexpr float kLargest<i8> = 127.0f;  // as much on both sides
template <>
inline constexpr float kLargest<e4m3> = 448.0f;
template <>
inline constexpr float kLargest<e5m2> = 57344.0f;

inline vu load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  vb bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, vu);
#endif
}

inline vf load(const i8* from) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  vsb bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, vi), vf);
#endif
}

// Codes of NaN and of infinity, which `store` never writes, may stand for any value.
#if defined(__F16C__) && defined(__AVX2__)

// As float16, whose exponent has another bias or, for e5m2, the same one.
inline vf load(const e4m3* from) {
#if defined(__AVX512F__)
  const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x7f)), 7);
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x80)), 8);
  return (vf)_mm512_cvtph_ps(_mm256_or_si256(rest, sign)) * 256.0f;
#else
  const __m128i code = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  const __m128i rest = _mm_slli_epi16(_mm_and_si128(code, _mm_set1_epi16(0x7f)), 7);
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(code, _mm_set1_epi16(0x80)), 8);
  return (vf)_mm256_cvtph_ps(_mm_or_si128(rest, sign)) * 256.0f;
#endif
}
inline vf load(const e5m2* from) {
#if defined(__AVX512F__)
  const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return (vf)_mm512_cvtph_ps(_mm256_slli_epi16(code, 8));
#else
  const __m128i code = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  return (vf)_mm256_cvtph_ps(_mm_slli_epi16(code, 8));
#endif
}

#else

// Exponent and fraction where float32 has them mean a value that is smaller by a power of two, so a product gives the
// right one, for subnormal numbers as well.
inline vf load(const e4m3* from) {
  const vu code = load_bytes(&from->bits);
  return (vf)((vu)((vf)((code & 0x7fu) << 20) * 0x1p120f) | ((code & 0x80u) << 24));
}
inline vf load(const e5m2* from) {
  const vu code = load_bytes(&from->bits);
  return (vf)((vu)((vf)((code & 0x7fu) << 21) * 0x1p112f) | ((code & 0x80u) << 24));
}

#endif

inline float widen(i8 value) { return static_cast<float>(value.bits); }
template <class T>
  requires(std::is_same_v<T, e4m3> || std::is_same_v<T, e5m2>)
inline float widen(T value) {
  T all[kLanes] = {value};
  return load(all)[0];
}

inline void store_low_bytes(uint8_t* to, vu values) {
  const vb bytes = __builtin_convertvector(values, vb);
  std::memcpy(to, &bytes, sizeof bytes);
}

// Rounded to the nearest, even of two; beyond the largest value the largest, NaN as 0.
inline vf clamped(vf value, float largest) {
  const vf inside = larger(smaller(value, splat(largest)), splat(-largest));
  return pick(value != value, splat(0.0f), inside);
}

inline void store(i8* to, vf value) {
  const vf rounded = clamped(value, kLargest<i8>) + 12582912.0f;  // 1.5 * 2^23: low bits are the integer
  store_low_bytes(reinterpret_cast<uint8_t*>(&to->bits), (vu)rounded);
}

template <int FractionBits, int Bias>
inline vu float_codes(vf value) {
  constexpr int kShift = 23 - FractionBits;
  const vu bits = (vu)value, size = bits & 0x7fffffffu;
  const vu rounded = (size + ((1u << (kShift - 1)) - 1u) + ((size >> kShift) & 1u)) >> kShift;
  const vu normal = rounded - (static_cast<uint32_t>(127 - Bias) << FractionBits);
  constexpr float kSteps = FractionBits == 3 ? 0x1p9f : 0x1p16f;  // of subnormal numbers, to 1
  const vu subnormal = (vu)((vf)size * kSteps + 8388608.0f) & 0xffu;  // 2^23: low bits are the integer
  const float least = FractionBits == 3 ? 0x1p-6f : 0x1p-14f;
  const vi small = (vi)((vf)size < splat(least));
  return (vu)(small ? (vi)subnormal : (vi)normal) | ((bits >> 24) & 0x80u);
}
inline void store(e4m3* to, vf value) {
  store_low_bytes(&to->bits, float_codes<3, 7>(clamped(value, kLargest<e4m3>)));
}
inline void store(e5m2* to, vf value) {
  store_low_bytes(&to->bits, float_codes<2, 15>(clamped(value, kLargest<e5m2>)));
}

}  // namespace cardan_native

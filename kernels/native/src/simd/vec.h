// Vectors of floats, as wide as the variant's registers, over the compiler's own vector types.
//
// Kernels are written against these; only dot products of integers and tile multiplications need intrinsics of their
// own. Narrow types are widened on load and rounded to nearest even on store, on every variant to the same bits.
// Functions of floats are in simd/functions.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/types.h"

namespace cardan_native {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vu __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vh __attribute__((vector_size(kLanes * 2)));  // bits of narrow floats

// Less zero rather than plus zero, which would make -0 to 0.
inline vf splat(float value) { return value - vf{}; }
inline vi splat_int(int32_t value) { return vi{} + value; }

// --- one value ---

inline float float_of(uint32_t bits) {
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline uint32_t bits_of(float value) {
  uint32_t out;
  std::memcpy(&out, &value, 4);
  return out;
}

inline float widen(float value) { return value; }
inline float widen(bf16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }
inline float widen(f16 value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  const uint32_t sign = (value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
  if (rest > 0x7c00u) return float_of(sign | 0x7fc00000u | ((rest & 0x3ffu) << 13));  // NaN, made quiet
  if (rest == 0x7c00u) return float_of(sign | 0x7f800000u);
  if (rest >= 0x400u) return float_of(sign | ((rest + 0x1c000u) << 13));
  return float_of(sign | bits_of(static_cast<float>(rest) * 0x1p-24f));
#endif
}

inline void narrow(float value, float* out) { *out = value; }
inline void narrow(float value, bf16* out) {
  const uint32_t bits = bits_of(value);
  if (value != value)
    out->bits = static_cast<uint16_t>((bits >> 16) | 0x40u);
  else
    out->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline void narrow(float value, f16* out) {
#if defined(__F16C__)
  out->bits = static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  uint32_t half;
  if (bits > 0x7f800000u)
    half = 0x7e00u | ((bits >> 13) & 0x3ffu);
  else if (bits >= 0x477ff000u)  // from the middle between the largest float16 and the next
    half = 0x7c00u;
  else if (bits >= 0x38800000u)
    half = (bits + 0xfffu + ((bits >> 13) & 1u) - 0x38000000u) >> 13;
  else
    half = static_cast<uint32_t>(std::nearbyint(float_of(bits) * 0x1p24f));
  out->bits = static_cast<uint16_t>(sign | half);
#endif
}

// --- loads and stores of kLanes values, at any address ---

inline vf load(const float* from) {
  vf out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
inline vf load(const bf16* from) {
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16);
#else
  vh bits;
  std::memcpy(&bits, from, sizeof bits);
  return (vf)(__builtin_convertvector(bits, vu) << 16);
#endif
}
inline vf load(const f16* from) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__) && defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  vf out;
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = widen(from[lane]);
  return out;
#endif
}

inline void store(float* to, vf value) { std::memcpy(to, &value, sizeof value); }
inline void store(bf16* to, vf value) {
  // Not the processor's own conversion, which makes denormals to 0.
  const vu bits = (vu)value;
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vu chosen = (vu)(value != value ? (vi)((bits >> 16) | 0x40u) : (vi)rounded);
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)chosen, (__m256i)chosen), 0x8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
#else
  const vh narrowed = __builtin_convertvector(chosen, vh);
  std::memcpy(to, &narrowed, sizeof narrowed);
#endif
}
inline void store(f16* to, vf value) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int lane = 0; lane < kLanes; ++lane) narrow(value[lane], to + lane);
#endif
}

// The first `count` of kLanes values; the others are 0 when loaded and left alone when stored.
template <class T>
inline vf load_part(const T* from, int count) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, from, sizeof(T) * static_cast<size_t>(count));
  return load(buffer);
}
template <class T>
inline void store_part(T* to, vf value, int count) {
  T buffer[kLanes];
  store(buffer, value);
  std::memcpy(to, buffer, sizeof(T) * static_cast<size_t>(count));
}

// --- across lanes ---

inline float sum_lanes(vf value) {
  for (int step = kLanes / 2; step >= 1; step /= 2)
    for (int lane = 0; lane < step; ++lane) value[lane] += value[lane + step];
  return value[0];
}
inline float max_lanes(vf value) {
  float most = value[0];
  for (int lane = 1; lane < kLanes; ++lane) most = value[lane] > most ? value[lane] : most;
  return most;
}

inline int32_t sum_lanes(vi value) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m128i upper = _mm256_extracti128_si256((__m256i)value, 1);
  const __m128i half = _mm_add_epi32(_mm256_castsi256_si128((__m256i)value), upper);
  const __m128i two = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
#else
  uint32_t sum = 0;  // which wraps around, as instructions for vectors do
  for (int lane = 0; lane < kLanes; ++lane) sum += static_cast<uint32_t>(value[lane]);
  return static_cast<int32_t>(sum);
#endif
}
inline int32_t max_lanes(vi value) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m128i upper = _mm256_extracti128_si256((__m256i)value, 1);
  const __m128i half = _mm_max_epi32(_mm256_castsi256_si128((__m256i)value), upper);
  const __m128i two = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
#else
  int32_t most = value[0];
  for (int lane = 1; lane < kLanes; ++lane) most = value[lane] > most ? value[lane] : most;
  return most;
#endif
}

// --- elementwise ---

// A comparison of vectors gives a condition: -1 where it holds, else 0.
inline vf pick(vi condition, vf yes, vf no) { return condition ? yes : no; }
inline vf larger(vf a, vf b) { return a > b ? a : b; }   // b where one is NaN
inline vf smaller(vf a, vf b) { return a < b ? a : b; }  // b where one is NaN
inline vf fused(vf a, vf b, vf c) { return a * b + c; }  // contracted to one instruction where there is one

}  // namespace cardan_native

#include "simd/functions.h"

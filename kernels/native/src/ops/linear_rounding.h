// Rounding of activations to integers, by groups of 32: every kernel gets the same ones.
#pragma once

#include "ops/linear_call.h"
#include "simd/vec.h"

namespace cardan_native {

inline constexpr int kGroupVectors = static_cast<int>(kGroup) / kLanes;
inline constexpr float kInt8Steps = 127.0f, kInt16Steps = 127.0f * 256.0f + 127.0f;
inline constexpr float kSmallestGroup = 1e-30f;  // groups below are taken for zeros: their inverse would overflow

inline float steps_of(Activations activations) {
  return activations == Activations::kInt16 ? kInt16Steps : kInt8Steps;
}

// What the offset of a weight's codes takes off a sum of products.
inline int32_t offset_of(const PackedLinear& weight, int32_t sum) { return -weight.offset * sum; }

// x * factor + shift, rounded once wherever it is inlined, so that all kernels get the same codes.
inline vf shifted(vf x, float factor, float shift) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)x, _mm512_set1_ps(factor), _mm512_set1_ps(shift));
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)x, _mm256_set1_ps(factor), _mm256_set1_ps(shift));
#else
  return x * factor + shift;
#endif
}

// 32 elements: each is about scale * code. NaN and infinity make the scale NaN and all codes 0.
struct RoundedGroup {
  vi codes[kGroupVectors];
  float scale;
};

template <class T>
inline RoundedGroup round_group(const T* from, float steps) {
  vf values[kGroupVectors];
  vi most{};  // bits of magnitudes are in the order of these, with infinity and NaN above all others
  for (int v = 0; v < kGroupVectors; ++v) {
    values[v] = load(from + v * kLanes);
    const vi magnitude = (vi)values[v] & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  const auto bits = static_cast<uint32_t>(max_lanes(most));
  const float largest = float_of(bits), inverse = largest > kSmallestGroup ? steps / largest : 0.0f;
  RoundedGroup out{};
  if (bits >= 0x7f800000u) {
    out.scale = NAN;
    return out;
  }
  for (int v = 0; v < kGroupVectors; ++v)  // 1.5 * 2^23: the low bits are the rounded integer
    out.codes[v] = (vi)shifted(values[v], inverse, 12582912.0f) - splat_int(0x4b400000);
  out.scale = largest > kSmallestGroup ? largest / steps : 0.0f;
  return out;
}

}  // namespace cardan_native

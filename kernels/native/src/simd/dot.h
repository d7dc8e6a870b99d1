// Dot products of unsigned bytes with signed bytes, four at a time for each lane.
//
// Where there is an instruction for four products and their sum in 32 bits, `dot_four` is it. Elsewhere `dot_two` gives
// sums of two products in 16 bits, which the caller adds up as long as they fit, and `fold` brings them to 32 bits.
#pragma once

#include "simd/vec.h"

namespace cardan_native {

// As wide as vf: sixteen-bit words, whose halves are codes or whose values are sums of two products.
typedef uint16_t vw __attribute__((vector_size(kLanes * 4)));

inline vw load_words(const void* from) {
  vw out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

// The same four bytes in every lane.
inline vw broadcast_four(const int8_t* from) {
  int32_t bits;
  std::memcpy(&bits, from, 4);
  return (vw)splat_int(bits);
}

// Keeps the compiler from reordering sums so that more of them are alive than there are registers.
template <class Vector>
inline void pin(Vector& words) {
#if defined(CARDAN_EMULATED)
  (void)words;
#elif defined(__AVX512F__)
  __asm__("" : "+v"(words));
#elif defined(__x86_64__)
  __asm__("" : "+x"(words));
#else
  (void)words;
#endif
}

#if defined(__AVX2__)
// sums + the products of both signed words of each lane.
inline vi add_pairs(vi sums, vw a, vw b) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#else
  return sums + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}
#endif

#if defined(__AVX512VNNI__)

inline constexpr bool kDotFour = true;

// sums + the dot products of four unsigned codes and four signed values in each lane.
inline vi dot_four(vi sums, vw codes, vw values) {
  return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)values);
}

#else

inline constexpr bool kDotFour = false;

// In each 16-bit word, the sum of two products; it must fit: 2 * 127 * code <= 32767, so codes are at most 128.
inline vw dot_two(vw codes, vw values) {
#if defined(__AVX2__)
  return (vw)_mm256_maddubs_epi16((__m256i)codes, (__m256i)values);
#else
  typedef int16_t signed_words __attribute__((vector_size(kLanes * 4)));
  const signed_words low = (signed_words)(codes & 255) * ((signed_words)(values << 8) >> 8);
  const signed_words high = (signed_words)(codes >> 8) * ((signed_words)values >> 8);
  return (vw)(low + high);
#endif
}

// sums + factor * both signed words of each lane.
inline vi fold(vi sums, vw words, int factor) {
#if defined(__AVX2__)
  const __m256i factors = _mm256_set1_epi16(static_cast<short>(factor));
  return (vi)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16((__m256i)words, factors));
#else
  return sums + (((vi)words << 16 >> 16) + ((vi)words >> 16)) * factor;
#endif
}

#endif

}  // namespace cardan_native

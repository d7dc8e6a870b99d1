// Stands in for AVX-512 and AMX on processors without them, for tests: included before everything else, it says that
// the instructions are there and computes what Intel's manuals say they do. Only those that the kernels use are here;
// a new one fails to compile until it is added.
//
// What a test sees is the arithmetic of the kernels' source, not the compiler's code for those processors. Functions
// that are not small are not inlined, or compiling would take very long.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace emulation {

[[noreturn]] inline void fault(const char* what) {
  std::fprintf(stderr, "emulated processor: %s\n", what);
  std::abort();
}

// --- AVX-512 ---

template <class To, class From>
inline To reinterpreted(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

struct Ints {
  int32_t lanes[16];
};
struct Floats {
  float lanes[16];
};
struct Bytes {
  uint8_t lanes[64];
};
struct Words {
  int16_t lanes[32];
};

template <class From, class Register>
inline __m512i widened(Register from) {
  From lanes[16];
  std::memcpy(lanes, &from, sizeof lanes);
  Ints out;
  for (int lane = 0; lane < 16; ++lane) out.lanes[lane] = lanes[lane];
  return reinterpreted<__m512i>(out);
}

inline __m512 same_floats(float value) {
  Floats out;
  for (float& lane : out.lanes) lane = value;
  return reinterpreted<__m512>(out);
}

// a * b + c, rounded once.
inline __m512 multiplied_and_added(__m512 a, __m512 b, __m512 c) {
  const auto left = reinterpreted<Floats>(a), right = reinterpreted<Floats>(b), added = reinterpreted<Floats>(c);
  Floats out;
  for (int lane = 0; lane < 16; ++lane)
    out.lanes[lane] = std::fma(left.lanes[lane], right.lanes[lane], added.lanes[lane]);
  return reinterpreted<__m512>(out);
}

inline __m512 to_floats(__m512i from) {
  const auto ints = reinterpreted<Ints>(from);
  Floats out;
  for (int lane = 0; lane < 16; ++lane) out.lanes[lane] = static_cast<float>(ints.lanes[lane]);
  return reinterpreted<__m512>(out);
}

inline __m512 halves_to_floats(__m256i from) {
  const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(from));
  const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(from, 1));
  Floats out;
  std::memcpy(out.lanes, &low, sizeof low);
  std::memcpy(out.lanes + 8, &high, sizeof high);
  return reinterpreted<__m512>(out);
}

inline __m256i floats_to_halves(__m512 from) {
  const auto floats = reinterpreted<Floats>(from);
  const __m128i low = _mm256_cvtps_ph(_mm256_loadu_ps(floats.lanes), _MM_FROUND_TO_NEAREST_INT);
  const __m128i high = _mm256_cvtps_ph(_mm256_loadu_ps(floats.lanes + 8), _MM_FROUND_TO_NEAREST_INT);
  return _mm256_set_m128i(high, low);
}

inline __m512i shifted_left(__m512i from, unsigned count) {
  auto ints = reinterpreted<Ints>(from);
  for (int32_t& lane : ints.lanes) lane = static_cast<int32_t>(static_cast<uint32_t>(lane) << count);
  return reinterpreted<__m512i>(ints);
}

inline __m512i all_equal(int32_t value) {
  Ints out;
  for (int32_t& lane : out.lanes) lane = value;
  return reinterpreted<__m512i>(out);
}

// VPDPBUSD: four products of unsigned and signed bytes, added without saturation.
[[gnu::noinline]] inline __m512i dot_bytes(__m512i sums, __m512i codes, __m512i values) {
  auto out = reinterpreted<Ints>(sums);
  const auto left = reinterpreted<Bytes>(codes), right = reinterpreted<Bytes>(values);
  for (int lane = 0; lane < 16; ++lane)
    for (int i = 4 * lane; i < 4 * lane + 4; ++i)
      out.lanes[lane] += left.lanes[i] * static_cast<int8_t>(right.lanes[i]);
  return reinterpreted<__m512i>(out);
}

// VPDPWSSD: two products of signed words, added without saturation.
[[gnu::noinline]] inline __m512i dot_words(__m512i sums, __m512i a, __m512i b) {
  auto out = reinterpreted<Ints>(sums);
  const auto left = reinterpreted<Words>(a), right = reinterpreted<Words>(b);
  for (int lane = 0; lane < 16; ++lane)
    for (int i = 2 * lane; i < 2 * lane + 2; ++i) out.lanes[lane] += left.lanes[i] * right.lanes[i];
  return reinterpreted<__m512i>(out);
}

// Numbers below the smallest normal one count as 0, on the way in and out.
inline float flushed(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value; }

inline float float_of_bf16(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, 2);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return flushed(out);
}

inline float added_product(float sum, const uint8_t* a, const uint8_t* b) {
  return flushed(std::fma(float_of_bf16(a), float_of_bf16(b), flushed(sum)));
}

// VDPBF16PS: the odd product first, then the even one.
[[gnu::noinline]] inline __m512 dot_bf16(__m512 sums, __m512bh a, __m512bh b) {
  auto out = reinterpreted<Floats>(sums);
  const auto left = reinterpreted<Bytes>(a), right = reinterpreted<Bytes>(b);
  for (int lane = 0; lane < 16; ++lane) {
    const uint8_t *x = left.lanes + 4 * lane, *y = right.lanes + 4 * lane;
    out.lanes[lane] = added_product(added_product(out.lanes[lane], x + 2, y + 2), x, y);
  }
  return reinterpreted<__m512>(out);
}

inline void store_aligned(void* to, __m512 value) {
  if (reinterpret_cast<uintptr_t>(to) % 64 != 0) fault("an aligned store of 64 bytes to another address");
  std::memcpy(to, &value, sizeof value);
}

// --- AMX ---

constexpr int kTiles = 8, kMostTileRows = 16, kMostTileBytes = 64;

// The tile registers of a thread. As after a reset, no tile has a shape.
struct Tiles {
  int rows[kTiles] = {}, bytes[kTiles] = {};
  uint8_t data[kTiles][kMostTileRows][kMostTileBytes] = {};
};

inline Tiles& tiles() {
  static thread_local Tiles state;
  return state;
}

inline void require_shape(int tile) {
  if (tiles().rows[tile] == 0 || tiles().bytes[tile] == 0) fault("a tile is used that has no shape");
}

[[gnu::noinline]] inline void configure(const void* from) {
  uint8_t config[64];
  std::memcpy(config, from, sizeof config);
  if (config[0] != 1) fault("tiles must be configured with palette 1");
  tiles() = Tiles{};
  for (int tile = 0; tile < kTiles; ++tile) {
    uint16_t bytes;
    std::memcpy(&bytes, config + 16 + 2 * tile, 2);
    const int rows = config[48 + tile];
    if (rows > kMostTileRows || bytes > kMostTileBytes) fault("a tile has at most 16 rows of 64 bytes");
    if ((rows == 0) != (bytes == 0)) fault("a tile has rows without bytes, or bytes without rows");
    tiles().rows[tile] = rows;
    tiles().bytes[tile] = bytes;
  }
}

inline void release() { tiles() = Tiles{}; }

inline void clear(int tile) {
  require_shape(tile);
  std::memset(tiles().data[tile], 0, sizeof tiles().data[tile]);
}

[[gnu::noinline]] inline void load_tile(int tile, const void* from, int64_t stride) {
  clear(tile);
  for (int row = 0; row < tiles().rows[tile]; ++row)
    std::memcpy(tiles().data[tile][row], static_cast<const char*>(from) + row * stride,
                static_cast<size_t>(tiles().bytes[tile]));
}

[[gnu::noinline]] inline void store_tile(int tile, void* to, int64_t stride) {
  require_shape(tile);
  for (int row = 0; row < tiles().rows[tile]; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, tiles().data[tile][row],
                static_cast<size_t>(tiles().bytes[tile]));
}

// Shapes that fit: sums [m][n], a [m][k], b [k][n], each element of b and of sums of four bytes.
inline void require_product(int sums, int a, int b) {
  for (int tile : {sums, a, b}) require_shape(tile);
  if (sums == a || sums == b || a == b) fault("a tile product needs three tiles");
  const Tiles& state = tiles();
  if (state.rows[sums] != state.rows[a] || state.bytes[sums] != state.bytes[b] || state.bytes[a] != 4 * state.rows[b])
    fault("the shapes of a tile product do not fit");
}

// sums[m][n] = add(sums[m][n], four bytes of a, four bytes of b) for each k.
template <class Sum, class Add>
inline void multiply_tiles(int sums, int a, int b, Add add) {
  require_product(sums, a, b);
  Tiles& state = tiles();
  for (int m = 0; m < state.rows[sums]; ++m)
    for (int k = 0; k < state.rows[b]; ++k)
      for (int n = 0; n < state.bytes[sums] / 4; ++n) {
        Sum sum;
        std::memcpy(&sum, state.data[sums][m] + 4 * n, 4);
        sum = add(sum, state.data[a][m] + 4 * k, state.data[b][k] + 4 * n);
        std::memcpy(state.data[sums][m] + 4 * n, &sum, 4);
      }
}

[[gnu::noinline]] inline void multiply_signed_unsigned(int sums, int a, int b) {
  multiply_tiles<int32_t>(sums, a, b, [](int32_t sum, const uint8_t* x, const uint8_t* y) {
    for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(x[i]) * y[i];
    return sum;
  });
}

[[gnu::noinline]] inline void multiply_bf16(int sums, int a, int b) {
  multiply_tiles<float>(sums, a, b, [](float sum, const uint8_t* x, const uint8_t* y) {
    return added_product(added_product(sum, x, y), x + 2, y + 2);
  });
}

}  // namespace emulation

#undef _mm512_cvtps_ph
#undef _mm512_slli_epi32
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero

#define _mm512_cvtepi32_ps emulation::to_floats
#define _mm512_cvtepi8_epi32 emulation::widened<int8_t>
#define _mm512_cvtepu8_epi32 emulation::widened<uint8_t>
#define _mm512_cvtepu16_epi32 emulation::widened<uint16_t>
#define _mm512_cvtph_ps emulation::halves_to_floats
#define _mm512_cvtps_ph(value, rounding) emulation::floats_to_halves(value)
#define _mm512_dpbf16_ps emulation::dot_bf16
#define _mm512_dpbusd_epi32 emulation::dot_bytes
#define _mm512_dpwssd_epi32 emulation::dot_words
#define _mm512_fmadd_ps emulation::multiplied_and_added
#define _mm512_set1_epi32 emulation::all_equal
#define _mm512_set1_ps emulation::same_floats
#define _mm512_setzero_ps __m512
#define _mm512_slli_epi32 emulation::shifted_left
#define _mm512_store_ps emulation::store_aligned

#define _tile_loadconfig emulation::configure
#define _tile_release emulation::release
#define _tile_loadd emulation::load_tile
#define _tile_stored emulation::store_tile
#define _tile_zero emulation::clear
#define _tile_dpbsud emulation::multiply_signed_unsigned
#define _tile_dpbf16ps emulation::multiply_bf16

#define CARDAN_EMULATED 1
#define __AVX512F__ 1
#define __AVX512VNNI__ 1
#define __AVX512BF16__ 1
#if defined(CARDAN_EMULATE_TILES)
#define __AMX_TILE__ 1
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1
#endif

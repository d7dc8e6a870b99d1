#include "ops/pack_formats.h"

#include <cstring>

namespace cardan_native {
namespace {

uint32_t half_bits(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  return bits;
}

// Sixteen bytes to 32 codes: the low halves, then the high ones.
void nibbles(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = from[i] & 15;
    codes[i + 16] = from[i] >> 4;
  }
}

void q4(const uint8_t* block, const Format& format, Block& out) {
  out.scale = half_bits(block);
  if (format.has_minimums) out.minimum = half_bits(block + 2);
  nibbles(block + (format.has_minimums ? 4 : 2), out.codes);
}

void q5(const uint8_t* block, const Format& format, Block& out) {
  const uint8_t* rest = block + (format.has_minimums ? 4 : 2);
  out.scale = half_bits(block);
  if (format.has_minimums) out.minimum = half_bits(block + 2);
  nibbles(rest + 4, out.codes);
  for (int i = 0; i < 32; ++i) out.codes[i] |= static_cast<uint8_t>((rest[i / 8] >> (i % 8) & 1) << 4);
}

void q8(const uint8_t* block, const Format&, Block& out) {
  out.scale = half_bits(block);
  for (int i = 0; i < 32; ++i) out.codes[i] = block[2 + i] ^ 0x80;
}

template <int kBits, int kScaleBytes>
void affine(const uint8_t* block, const Format& format, Block& out) {
  std::memcpy(&out.scale, block, kScaleBytes);
  std::memcpy(&out.minimum, block + kScaleBytes, kScaleBytes);
  const uint8_t* packed = block + 2 * kScaleBytes;
  if constexpr (kBits == 8) {
    std::memcpy(out.codes, packed, format.elements);
  } else {
    for (int i = 0; i < format.elements; ++i) out.codes[i] = packed[i / 2] >> (i % 2 * 4) & 15;
  }
}

// Signed codes: nibbles are stored + 8, bytes as they are.
template <int kBits, int kScaleBytes>
void integers(const uint8_t* block, const Format& format, Block& out) {
  std::memcpy(&out.scale, block, kScaleBytes);
  const uint8_t* packed = block + kScaleBytes;
  for (int i = 0; i < format.elements; ++i)
    out.codes[i] = kBits == 8 ? packed[i] ^ 0x80 : packed[i / 2] >> (i % 2 * 4) & 15;
}

void float8(const uint8_t* block, const Format& format, Block& out) {
  std::memcpy(&out.scale, block, 4);
  std::memcpy(out.codes, block + 4, format.elements);
}

// Twice the values of E2M1 floats are whole numbers; half the power of two is a bfloat16, which 2^-127 and 2^-128 are
// without an exponent of their own.
void mxfp4(const uint8_t* block, const Format&, Block& out) {
  constexpr uint8_t kDoubled[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  const uint32_t exponent = block[0];
  out.scale = exponent == 255 ? 0x7fc0 : exponent > 1 ? (exponent - 1) << 7 : 0x20u << exponent;
  nibbles(block + 1, out.codes);
  for (int i = 0; i < 32; ++i) out.codes[i] = kDoubled[out.codes[i]];
}

// Eight 6-bit scales and eight 6-bit minimums in twelve bytes.
void six_bit_pairs(const uint8_t* packed, Block& out) {
  for (int i = 0; i < 4; ++i) {
    const uint8_t scale = packed[i], minimum = packed[i + 4], rest = packed[i + 8];
    out.scale_codes[i] = scale & 63;
    out.minimum_codes[i] = minimum & 63;
    out.scale_codes[i + 4] = static_cast<uint8_t>((rest & 15) | scale >> 6 << 4);
    out.minimum_codes[i + 4] = static_cast<uint8_t>(rest >> 4 | minimum >> 6 << 4);
  }
}

// 128 bytes: each 32 hold one group of 32 in their low halves and the next in their high ones.
void chunks(const uint8_t* from, uint8_t* codes) {
  for (int chunk = 0; chunk < 4; ++chunk, from += 32, codes += 64)
    for (int i = 0; i < 32; ++i) {
      codes[i] = from[i] & 15;
      codes[i + 32] = from[i] >> 4;
    }
}

void q4_k(const uint8_t* block, const Format&, Block& out) {
  out.scale = half_bits(block);
  out.minimum = half_bits(block + 2);
  six_bit_pairs(block + 4, out);
  chunks(block + 16, out.codes);
}

void q5_k(const uint8_t* block, const Format&, Block& out) {
  out.scale = half_bits(block);
  out.minimum = half_bits(block + 2);
  six_bit_pairs(block + 4, out);
  chunks(block + 48, out.codes);
  for (int i = 0; i < 256; ++i) out.codes[i] |= static_cast<uint8_t>((block[16 + i % 32] >> (i / 32) & 1) << 4);
}

void q6_k(const uint8_t* block, const Format&, Block& out) {
  const uint8_t *low = block, *high = block + 128;
  for (int half = 0; half < 2; ++half)
    for (int quarter = 0; quarter < 4; ++quarter)
      for (int i = 0; i < 32; ++i) {
        const int nibble = low[half * 64 + quarter % 2 * 32 + i] >> (quarter / 2 * 4) & 15;
        const int pair = high[half * 32 + i] >> (2 * quarter) & 3;
        out.codes[half * 128 + quarter * 32 + i] = static_cast<uint8_t>(nibble | pair << 4);
      }
  std::memcpy(out.scale_codes, block + 192, 16);
  out.scale = half_bits(block + 208);
}

// 64 bytes: each 32 hold four planes of two bits, of 32 elements each.
void planes_of_two(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < 256; ++i) codes[i] = from[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}

void q2_k(const uint8_t* block, const Format&, Block& out) {
  for (int i = 0; i < 16; ++i) {
    out.scale_codes[i] = block[i] & 15;
    out.minimum_codes[i] = block[i] >> 4;
  }
  planes_of_two(block + 16, out.codes);
  out.scale = half_bits(block + 80);
  out.minimum = half_bits(block + 82);
}

void q3_k(const uint8_t* block, const Format&, Block& out) {
  planes_of_two(block + 32, out.codes);
  for (int i = 0; i < 256; ++i) out.codes[i] |= static_cast<uint8_t>((block[i % 32] >> (i / 32) & 1) << 2);
  const uint8_t* packed = block + 96;
  for (int i = 0; i < 16; ++i) {
    const int low = packed[i % 8] >> (i / 8 * 4) & 15;
    const int high = packed[8 + i % 4] >> (i / 4 * 2) & 3;
    out.scale_codes[i] = static_cast<uint8_t>(low + 16 * high - 32);
  }
  out.scale = half_bits(block + 108);
}

template <int kBits, int kGroupSize>
constexpr Format affine_format(const char* name, Scales scales) {
  constexpr Codes kCodes = kBits == 4 ? Codes::kNibble : Codes::kByte;
  const bool wide = scales == Scales::kF32;
  return {name,   kGroupSize, (wide ? 8 : 4) + kGroupSize * kBits / 8, kCodes, scales, kGroupSize, true, 0,
          false, wide ? &affine<kBits, 4> : &affine<kBits, 2>};
}

template <int kBits, int kGroupSize>
constexpr Format integer_format(const char* name, Scales scales) {
  constexpr Codes kCodes = kBits == 4 ? Codes::kNibble : Codes::kByte;
  const bool wide = scales == Scales::kF32;
  return {name,  kGroupSize, (wide ? 4 : 2) + kGroupSize * kBits / 8, kCodes, scales, kGroupSize, false,
          kBits == 4 ? 8 : 128, false, wide ? &integers<kBits, 4> : &integers<kBits, 2>};
}

constexpr Format float8_format(const char* name, int group) {
  return {name, group, 4 + group, Codes::kE4M3, Scales::kF32, group, false, 0, false, &float8};
}

constexpr Format kFormats[] = {
    {.name = "F32", .elements = 1, .bytes = 4, .codes = Codes::kF32},
    {.name = "F16", .elements = 1, .bytes = 2, .codes = Codes::kF16},
    {.name = "BF16", .elements = 1, .bytes = 2, .codes = Codes::kBF16},
    {.name = "F8_E4M3", .elements = 1, .bytes = 1, .codes = Codes::kE4M3},
    {.name = "F8_E5M2", .elements = 1, .bytes = 1, .codes = Codes::kE5M2},
    {"Q4_0", 32, 18, Codes::kNibble, Scales::kF16, 32, false, 8, false, &q4},
    {"Q4_1", 32, 20, Codes::kNibble, Scales::kF16, 32, true, 0, false, &q4},
    {"Q5_0", 32, 22, Codes::kFive, Scales::kF16, 32, false, 16, false, &q5},
    {"Q5_1", 32, 24, Codes::kFive, Scales::kF16, 32, true, 0, false, &q5},
    {"Q8_0", 32, 34, Codes::kByte, Scales::kF16, 32, false, 128, false, &q8},
    {"Q2_K", 256, 84, Codes::kNibble, Scales::kSuper, 16, true, 0, false, &q2_k},
    {"Q3_K", 256, 110, Codes::kNibble, Scales::kSuper, 16, false, 4, true, &q3_k},
    {"Q4_K", 256, 144, Codes::kNibble, Scales::kSuper, 32, true, 0, false, &q4_k},
    {"Q5_K", 256, 176, Codes::kFive, Scales::kSuper, 32, true, 0, false, &q5_k},
    {"Q6_K", 256, 210, Codes::kSix, Scales::kSuper, 16, false, 32, true, &q6_k},
    affine_format<4, 32>("AFFINE4_32_F16", Scales::kF16),
    affine_format<4, 32>("AFFINE4_32_BF16", Scales::kBF16),
    affine_format<4, 32>("AFFINE4_32_F32", Scales::kF32),
    affine_format<4, 64>("AFFINE4_64_F16", Scales::kF16),
    affine_format<4, 64>("AFFINE4_64_BF16", Scales::kBF16),
    affine_format<4, 64>("AFFINE4_64_F32", Scales::kF32),
    affine_format<4, 128>("AFFINE4_128_F16", Scales::kF16),
    affine_format<4, 128>("AFFINE4_128_BF16", Scales::kBF16),
    affine_format<4, 128>("AFFINE4_128_F32", Scales::kF32),
    affine_format<8, 32>("AFFINE8_32_F16", Scales::kF16),
    affine_format<8, 32>("AFFINE8_32_BF16", Scales::kBF16),
    affine_format<8, 32>("AFFINE8_32_F32", Scales::kF32),
    affine_format<8, 64>("AFFINE8_64_F16", Scales::kF16),
    affine_format<8, 64>("AFFINE8_64_BF16", Scales::kBF16),
    affine_format<8, 64>("AFFINE8_64_F32", Scales::kF32),
    affine_format<8, 128>("AFFINE8_128_F16", Scales::kF16),
    affine_format<8, 128>("AFFINE8_128_BF16", Scales::kBF16),
    affine_format<8, 128>("AFFINE8_128_F32", Scales::kF32),
    {"MXFP4", 32, 17, Codes::kFive, Scales::kBF16, 32, false, 12, false, &mxfp4},
    integer_format<4, 32>("INT4_32_F16", Scales::kF16),
    integer_format<4, 32>("INT4_32_BF16", Scales::kBF16),
    integer_format<4, 32>("INT4_32_F32", Scales::kF32),
    integer_format<4, 64>("INT4_64_F16", Scales::kF16),
    integer_format<4, 64>("INT4_64_BF16", Scales::kBF16),
    integer_format<4, 64>("INT4_64_F32", Scales::kF32),
    integer_format<4, 128>("INT4_128_F16", Scales::kF16),
    integer_format<4, 128>("INT4_128_BF16", Scales::kBF16),
    integer_format<4, 128>("INT4_128_F32", Scales::kF32),
    integer_format<8, 32>("INT8_32_F16", Scales::kF16),
    integer_format<8, 32>("INT8_32_BF16", Scales::kBF16),
    integer_format<8, 32>("INT8_32_F32", Scales::kF32),
    integer_format<8, 64>("INT8_64_F16", Scales::kF16),
    integer_format<8, 64>("INT8_64_BF16", Scales::kBF16),
    integer_format<8, 64>("INT8_64_F32", Scales::kF32),
    integer_format<8, 128>("INT8_128_F16", Scales::kF16),
    integer_format<8, 128>("INT8_128_BF16", Scales::kBF16),
    integer_format<8, 128>("INT8_128_F32", Scales::kF32),
    integer_format<8, 32>("INT8_32_F32_A8", Scales::kF32),
    integer_format<8, 64>("INT8_64_F32_A8", Scales::kF32),
    integer_format<8, 128>("INT8_128_F32_A8", Scales::kF32),
    float8_format("FP8_32_F32", 32),
    float8_format("FP8_64_F32", 64),
    float8_format("FP8_128_F32", 128),
};

}  // namespace

const Format* find_format(const std::string& name) {
  for (const Format& format : kFormats)
    if (name == format.name) return &format;
  return nullptr;
}

const Format* all_formats(size_t& count) {
  count = std::size(kFormats);
  return kFormats;
}

}  // namespace cardan_native

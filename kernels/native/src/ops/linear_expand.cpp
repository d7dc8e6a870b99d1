#include "ops/linear_expand.h"

#include <algorithm>

#include "ops/linear_lines.h"

namespace cardan_native {
namespace {

constexpr int64_t kMostUnits = 64;  // of 1,024 inner elements, and of as many groups of 16

// One row of 16 scales at a time, so that the loop over lanes becomes vector code.
template <class T>
void widen_rows(const uint8_t* from, int64_t stride, int64_t rows, int64_t repeats, float* out) {
  for (int64_t row = 0; row < rows; ++row, from += stride) {
    const T* values = reinterpret_cast<const T*>(from);
    for (int v = 0; v < kPanelVectors; ++v) {
      const vf value = load(values + v * kLanes);
      for (int64_t copy = 0; copy < repeats; ++copy) store(out + (row * repeats + copy) * kPanel + v * kLanes, value);
    }
  }
}

template <class T>
void plain_scales(const PackedLinear& packed, const uint8_t* scales, int64_t first, int64_t count, float* out_scales,
                  float* out_minimums) {
  const int64_t repeats = packed.scale_group / packed.unit(), row_bytes = kPanel * static_cast<int64_t>(sizeof(T));
  const int64_t stride = row_bytes * (packed.has_minimums ? 2 : 1);
  const uint8_t* at = scales + first / repeats * stride;
  // Pieces begin and end at scale groups: they are multiples of 128 inner elements, or end with the row.
  widen_rows<T>(at, stride, count / repeats, repeats, out_scales);
  if (packed.has_minimums) widen_rows<T>(at + row_bytes, stride, count / repeats, repeats, out_minimums);
}

void multiplied(const uint8_t* bytes, bool is_signed, const float* factor, bool negate, float* out) {
  for (int lane = 0; lane < kPanel; ++lane) {
    const int code = is_signed ? static_cast<int8_t>(bytes[lane]) : static_cast<int>(bytes[lane]);
    const float product = static_cast<float>(code) * factor[lane];
    out[lane] = negate ? -product : product;
  }
}

void super_scales(const PackedLinear& packed, const uint8_t* scales, int64_t first, int64_t count, float* out_scales,
                  float* out_minimums) {
  const int64_t groups = kSuperBlock / packed.scale_group, parts = packed.has_minimums ? 2 : 1;
  const int64_t block_bytes = parts * kPanel * (2 + groups);
  float scale[kPanel], minimum[kPanel];
  int64_t block_now = -1;
  for (int64_t unit = first; unit < first + count; ++unit, out_scales += kPanel, out_minimums += kPanel) {
    const uint8_t* block = scales + unit / groups * block_bytes;
    if (unit / groups != block_now) {
      block_now = unit / groups;
      widen_rows<f16>(block, 0, 1, 1, scale);
      if (packed.has_minimums) widen_rows<f16>(block + 2 * kPanel, 0, 1, 1, minimum);
    }
    const uint8_t* bytes = block + parts * kPanel * (2 + unit % groups);
    multiplied(bytes, packed.signed_scales, scale, false, out_scales);
    if (packed.has_minimums) multiplied(bytes + kPanel, false, minimum, true, out_minimums);
  }
}

template <Codes kCodes>
void widen_groups(const uint8_t* group, int64_t count, int offset, float* out) {
  for (int64_t i = 0; i < count; ++i, group += group_bytes(kCodes))
#pragma GCC unroll 8
    for (int step = 0; step < 8; ++step, out += 4 * kPanel) {
      const Line line = load_line<kCodes>(group, step);
      for (int v = 0; v < kPanelVectors; ++v)
        for (int byte = 0; byte < 4; ++byte) {
          const vi code = (vi)((vu)line.part[v] >> 8 * byte & 255u) - splat_int(offset);
          store(out + byte * kPanel + v * kLanes, __builtin_convertvector(code, vf));
        }
    }
}

template <class T>
void expand_floats(const T* from, int64_t count, float* out) {
  for (int64_t i = 0; i < count * kPanel; i += kLanes) store(out + i, load(from + i));
}

void expand_pairs(const bf16* from, int64_t count, float* out) {
  for (int64_t row = 0; row < count; row += 2, from += 2 * kPanel)
    for (int v = 0; v < kPanelVectors; ++v) {
      const PairOf pair = load_pair(from + v * kLanes * 2);
      store(out + row * kPanel + v * kLanes, pair.even);
      if (row + 1 < count) store(out + (row + 1) * kPanel + v * kLanes, pair.odd);
    }
}

// Eight-bit floats are float16 with fewer bits: E5M2 in its upper half, E4M3 with its exponent off by 8.
void expand_bytes(Codes kind, const uint8_t* from, int64_t count, float* out) {
  const float factor = kind == Codes::kE4M3 ? 256.0f : 1.0f;
  for (int64_t row = 0; row < count; ++row, from += kPanel, out += kPanel) {
    f16 halves[kPanel];
    for (int lane = 0; lane < kPanel; ++lane) {
      const unsigned code = from[lane], magnitude = code & 0x7fu;
      const unsigned small = magnitude == 0x7fu ? 0x7e00u : magnitude << 7;
      halves[lane].bits = static_cast<uint16_t>(kind == Codes::kE4M3 ? small | (code & 0x80u) << 8 : code << 8);
    }
    for (int v = 0; v < kPanelVectors; ++v) store(out + v * kLanes, load(halves + v * kLanes) * factor);
  }
}

// As expand_bytes, times the scales: `first` and `count` are multiples of 128, or end with the row.
void expand_scaled_bytes(const PackedLinear& packed, int64_t panel, int64_t first, int64_t count, float* out) {
  alignas(64) float scales[kMostUnits * kPanel];
  const uint8_t* codes = packed.panel_codes(panel);
  for (int64_t done = 0; done < count; done += kMostUnits * kGroup) {
    const int64_t now = std::min(kMostUnits * kGroup, count - done);
    expand_scales(packed, panel, (first + done) / kGroup, now / kGroup, scales, nullptr);
    expand_bytes(packed.codes, codes + (first + done) * kPanel, now, out);
    for (int64_t row = 0; row < now; ++row, out += kPanel)
      for (int v = 0; v < kPanelVectors; ++v)
        store(out + v * kLanes, load(out + v * kLanes) * load(scales + row / kGroup * kPanel + v * kLanes));
  }
}

template <Codes kCodes>
void expand_lines(const uint8_t* group, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i, group += group_bytes(kCodes))
#pragma GCC unroll 8
    for (int step = 0; step < 8; ++step, codes += kLine) store_line(codes, load_line<kCodes>(group, step));
}

unsigned code_at(const PackedLinear& packed, const uint8_t* codes, int64_t lane, int64_t column) {
  const uint8_t* group = codes + column / kGroup * group_bytes(packed.codes) + lane * 4;
  const int64_t element = column % kGroup, step = element / 4, byte = element % 4;
  if (packed.codes == Codes::kByte) return group[step * kLine + byte];
  unsigned code = group[step % 4 * kLine + byte] >> (step / 4 * 4) & 15u;
  if (packed.codes == Codes::kFive) code |= (group[4 * kLine + byte] >> step & 1u) << 4;
  if (packed.codes == Codes::kSix) code |= (group[(4 + step / 4) * kLine + byte] >> (step % 4 * 2) & 3u) << 4;
  return code;
}

void expand_grouped_row(const PackedLinear& packed, int64_t row, float* out) {
  alignas(64) float scales[kMostUnits * kPanel], minimums[kMostUnits * kPanel];
  const int64_t panel = row / kPanel, lane = row % kPanel, unit = packed.unit(), units = packed.columns / unit;
  for (int64_t start = 0; start < units; start += kMostUnits) {
    const int64_t now = std::min(kMostUnits, units - start);
    expand_scales(packed, panel, start, now, scales, minimums);
    for (int64_t i = 0; i < now * unit; ++i) {
      const int64_t column = start * unit + i, at = i / unit * kPanel + lane;
      const int code = static_cast<int>(code_at(packed, packed.panel_codes(panel), lane, column)) - packed.offset;
      const float product = static_cast<float>(code) * scales[at];
      out[column] = packed.has_minimums ? product + minimums[at] : product;
    }
  }
}

}  // namespace

void expand_scales(const PackedLinear& packed, int64_t panel, int64_t first, int64_t count, float* scales,
                   float* minimums) {
  const uint8_t* from = packed.panel_scales(panel);
  switch (packed.scales) {
    case Scales::kF32:
      return plain_scales<float>(packed, from, first, count, scales, minimums);
    case Scales::kBF16:
      return plain_scales<bf16>(packed, from, first, count, scales, minimums);
    case Scales::kF16:
      return plain_scales<f16>(packed, from, first, count, scales, minimums);
    case Scales::kSuper:
      return super_scales(packed, from, first, count, scales, minimums);
    case Scales::kNone:
      return;
  }
}

void expand_codes(const PackedLinear& packed, int64_t panel, int64_t first, int64_t count, uint8_t* codes) {
  const uint8_t* groups = packed.panel_codes(panel) + first * group_bytes(packed.codes);
  switch (packed.codes) {
    case Codes::kNibble:
      return expand_lines<Codes::kNibble>(groups, count, codes);
    case Codes::kFive:
      return expand_lines<Codes::kFive>(groups, count, codes);
    case Codes::kSix:
      return expand_lines<Codes::kSix>(groups, count, codes);
    default:
      return expand_lines<Codes::kByte>(groups, count, codes);
  }
}

void expand_float_codes(const PackedLinear& packed, int64_t panel, int64_t first, int64_t count, float* codes) {
  const uint8_t* groups = packed.panel_codes(panel) + first * group_bytes(packed.codes);
  switch (packed.codes) {
    case Codes::kNibble:
      return widen_groups<Codes::kNibble>(groups, count, packed.offset, codes);
    case Codes::kFive:
      return widen_groups<Codes::kFive>(groups, count, packed.offset, codes);
    case Codes::kSix:
      return widen_groups<Codes::kSix>(groups, count, packed.offset, codes);
    default:
      return widen_groups<Codes::kByte>(groups, count, packed.offset, codes);
  }
}

void expand_dense(const PackedLinear& packed, int64_t panel, int64_t first, int64_t count, float* weights) {
  const uint8_t* dense = packed.panel_codes(panel) + first * group_bytes(packed.codes);
  switch (packed.codes) {
    case Codes::kF32:
      return expand_floats(reinterpret_cast<const float*>(dense), count, weights);
    case Codes::kF16:
      return expand_floats(reinterpret_cast<const f16*>(dense), count, weights);
    case Codes::kBF16:
      return expand_pairs(reinterpret_cast<const bf16*>(dense), count, weights);
    default:
      if (packed.scales != Scales::kNone) return expand_scaled_bytes(packed, panel, first, count, weights);
      return expand_bytes(packed.codes, dense, count, weights);
  }
}

void expand_row(const PackedLinear& packed, int64_t row, float* weights) {
  if (packed.grouped()) return expand_grouped_row(packed, row, weights);
  constexpr int64_t kPiece = 128;  // as scales want it
  alignas(64) float piece[kPiece * kPanel];
  for (int64_t first = 0; first < packed.columns; first += kPiece) {
    const int64_t count = std::min(kPiece, packed.columns - first);
    expand_dense(packed, row / kPanel, first, count, piece);
    for (int64_t i = 0; i < count; ++i) weights[first + i] = piece[i * kPanel + row % kPanel];
  }
}

}  // namespace cardan_native

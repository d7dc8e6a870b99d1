#include "ops/packed.h"

#include <cstring>

#include "core/threads.h"
#include "ops/linear_choice.h"
#include "ops/pack_formats.h"
#include "simd/vec.h"

namespace cardan_native {
namespace {

// Where one output row lies in its panel.
struct Lane {
  uint8_t* codes;
  uint8_t* scales;
  int64_t index;
};

int64_t panel_code_bytes(Codes codes, int64_t columns) {
  if (codes >= Codes::kNibble) return columns / kGroup * group_bytes(codes);
  return (codes == Codes::kBF16 ? (columns + 1) / 2 * 2 : columns) * group_bytes(codes);
}

// 32 codes of a row, into their group.
void place_group(Codes kind, const uint8_t* codes, uint8_t* group, int64_t lane) {
  if (kind == Codes::kE4M3) {
    for (int element = 0; element < kGroup; ++element) group[element * kPanel + lane] = codes[element];
    return;
  }
  if (kind == Codes::kByte) {
    for (int step = 0; step < 8; ++step) std::memcpy(group + step * kLine + lane * 4, codes + 4 * step, 4);
    return;
  }
  for (int step = 0; step < 4; ++step)
    for (int i = 0; i < 4; ++i) {
      const int low = codes[4 * step + i] & 15, high = codes[16 + 4 * step + i] & 15;
      group[step * kLine + lane * 4 + i] = static_cast<uint8_t>(low | high << 4);
    }
  if (kind == Codes::kNibble) return;
  uint8_t* planes = group + 4 * kLine + lane * 4;
  for (int element = 0; element < 32; ++element) {
    const int step = element / 4, rest = codes[element] >> 4;
    if (kind == Codes::kFive)
      planes[element % 4] |= static_cast<uint8_t>(rest << step);
    else
      planes[step / 4 * kLine + element % 4] |= static_cast<uint8_t>(rest << (step % 4 * 2));
  }
}

void place_scale(Scales kind, uint32_t bits, uint8_t* row, int64_t lane) {
  const size_t size = kind == Scales::kF32 ? 4 : 2;
  std::memcpy(row + static_cast<size_t>(lane) * size, &bits, size);
}

void place_plain_scales(const Format& format, const Block& block, int64_t index, const Lane& lane) {
  const int64_t row_bytes = kPanel * (format.scales == Scales::kF32 ? 4 : 2);
  uint8_t* rows = lane.scales + index * row_bytes * (format.has_minimums ? 2 : 1);
  place_scale(format.scales, block.scale, rows, lane.index);
  if (format.has_minimums) place_scale(format.scales, block.minimum, rows + row_bytes, lane.index);
}

void place_super_scales(const Format& format, const Block& block, int64_t index, const Lane& lane) {
  const int64_t parts = format.has_minimums ? 2 : 1, groups = kSuperBlock / format.scale_group;
  uint8_t* at = lane.scales + index * parts * kPanel * (2 + groups);
  place_scale(Scales::kF16, block.scale, at, lane.index);
  if (format.has_minimums) place_scale(Scales::kF16, block.minimum, at + 2 * kPanel, lane.index);
  at += parts * 2 * kPanel;
  for (int64_t group = 0; group < groups; ++group, at += parts * kPanel) {
    at[lane.index] = block.scale_codes[group];
    if (format.has_minimums) at[kPanel + lane.index] = block.minimum_codes[group];
  }
}

void place_blocks(const Format& format, const uint8_t* raw, int64_t columns, const Lane& lane) {
  Block block;
  const int64_t blocks = columns / format.elements, group_size = panel_code_bytes(format.codes, kGroup);
  uint8_t* group = lane.codes;
  for (int64_t index = 0; index < blocks; ++index, raw += format.bytes) {
    format.take_apart(raw, format, block);
    for (int first = 0; first < format.elements; first += kGroup, group += group_size)
      place_group(format.codes, block.codes + first, group, lane.index);
    if (format.scales == Scales::kSuper)
      place_super_scales(format, block, index, lane);
    else
      place_plain_scales(format, block, index, lane);
  }
}

template <class T>
void place_each(const T* raw, int64_t columns, const Lane& lane) {
  T* to = reinterpret_cast<T*>(lane.codes);
  for (int64_t column = 0; column < columns; ++column)
    std::memcpy(to + column * kPanel + lane.index, reinterpret_cast<const char*>(raw) + column * sizeof(T), sizeof(T));
}

template <class From, class To>
void place_narrowed(const From* raw, int64_t columns, const Lane& lane) {
  To* to = reinterpret_cast<To*>(lane.codes);
  for (int64_t column = 0; column < columns; ++column) {
    From value;
    std::memcpy(&value, raw + column, sizeof value);
    const int64_t at = std::is_same_v<To, bf16> ? (column / 2 * kPanel + lane.index) * 2 + column % 2
                                                : column * kPanel + lane.index;
    narrow(widen(value), to + at);
  }
}

// bfloat16 keeps its bits: pairs of a row stay together.
void place_pairs(const uint8_t* raw, int64_t columns, const Lane& lane) {
  for (int64_t column = 0; column < columns; ++column)
    std::memcpy(lane.codes + ((column / 2 * kPanel + lane.index) * 2 + column % 2) * 2, raw + column * 2, 2);
}

void place_dense(const Format& format, Codes codes, const uint8_t* raw, int64_t columns, const Lane& lane) {
  if (format.codes == Codes::kF32 && codes == Codes::kBF16)
    place_narrowed<float, bf16>(reinterpret_cast<const float*>(raw), columns, lane);
  else if (format.codes == Codes::kF32 && codes == Codes::kF16)
    place_narrowed<float, f16>(reinterpret_cast<const float*>(raw), columns, lane);
  else if (codes == Codes::kF32)
    place_each(reinterpret_cast<const uint32_t*>(raw), columns, lane);
  else if (codes == Codes::kBF16)
    place_pairs(raw, columns, lane);
  else if (codes == Codes::kF16)
    place_each(reinterpret_cast<const uint16_t*>(raw), columns, lane);
  else
    place_each(raw, columns, lane);
}

// F32 weights take the type of the activations; all others stay as they are.
Codes stored_codes(const Format& format, DType dtype) {
  if (format.codes != Codes::kF32 || dtype == DType::kF32) return format.codes;
  return dtype == DType::kBF16 ? Codes::kBF16 : Codes::kF16;
}

int64_t panel_scale_bytes(const Format& format, int64_t columns) {
  const int64_t parts = format.has_minimums ? 2 : 1;
  if (format.scales == Scales::kNone) return 0;
  if (format.scales == Scales::kSuper)
    return columns / kSuperBlock * parts * kPanel * (2 + kSuperBlock / format.scale_group);
  return columns / format.scale_group * parts * kPanel * (format.scales == Scales::kF32 ? 4 : 2);
}

const Format& check(const PackRequest& request) {
  const Format* format = find_format(request.format);
  if (!format) throw std::invalid_argument("pack_linear: no linear here takes the format " + request.format);
  if (request.columns < 1 || request.columns % format->elements)
    throw std::invalid_argument("pack_linear: in_features must be a multiple of " + std::to_string(format->elements) +
                                " for " + request.format + ", got " + std::to_string(request.columns));
  for (const RawRows& part : request.parts) {
    const int64_t expected = part.rows * (request.columns / format->elements) * format->bytes;
    if (part.rows < 0 || part.bytes != expected)
      throw std::invalid_argument("pack_linear: " + std::to_string(part.rows) + " rows of " + request.format +
                                  " must be " + std::to_string(expected) + " bytes, got " + std::to_string(part.bytes));
  }
  return *format;
}

std::vector<float> padded_bias(const PackedLinear& packed, const Tensor* bias) {
  if (!bias) return {};
  expect_dtype("pack_linear", "bias", *bias, DType::kF32);
  expect_shape("pack_linear", "bias", *bias, {packed.rows});
  std::vector<float> padded(static_cast<size_t>(packed.panels() * kPanel), 0.0f);
  std::memcpy(padded.data(), bias->data, static_cast<size_t>(packed.rows) * 4);
  return padded;
}

// The row of that number among all parts.
const uint8_t* raw_row(const PackRequest& request, int64_t row, int64_t row_bytes) {
  for (const RawRows& part : request.parts) {
    if (row < part.rows) return part.data + row * row_bytes;
    row -= part.rows;
  }
  return nullptr;
}

void fill(const PackRequest& request, const Format& format, const PackedLinear& packed) {
  const int64_t row_bytes = request.columns / format.elements * format.bytes;
  auto* codes = const_cast<uint8_t*>(packed.code_data);
  auto* scales = const_cast<uint8_t*>(packed.scale_data);
  Pool& pool = Pool::get();
  pool.parallel(packed.panels(), pool.even_grain(packed.panels()), [&](int64_t first, int64_t last) {
    for (int64_t row = first * kPanel; row < std::min(last * kPanel, packed.rows); ++row) {
      const int64_t panel = row / kPanel;
      const Lane lane{codes + panel * packed.code_bytes, scales + panel * packed.scale_bytes, row % kPanel};
      const uint8_t* raw = raw_row(request, row, row_bytes);
      if (format.take_apart)
        place_blocks(format, raw, request.columns, lane);
      else
        place_dense(format, packed.codes, raw, request.columns, lane);
    }
  });
}

}  // namespace

std::vector<std::string> packable_formats() {
  size_t count = 0;
  const Format* formats = all_formats(count);
  std::vector<std::string> names;
  for (size_t i = 0; i < count; ++i) names.push_back(formats[i].name);
  return names;
}

std::shared_ptr<const PackedLinear> pack(const PackRequest& request) {
  const Format& format = check(request);
  auto packed = std::make_shared<PackedLinear>();
  for (const RawRows& part : request.parts) packed->rows += part.rows;
  packed->columns = request.columns;
  packed->codes = stored_codes(format, request.dtype);
  packed->scales = format.scales;
  packed->scale_group = format.scale_group;
  packed->offset = format.offset;
  packed->has_minimums = format.has_minimums;
  packed->signed_scales = format.signed_scales;
  packed->activations = packed->grouped() ? request.activations : Activations::kFloat;
  packed->dtype = request.dtype;
  packed->crossovers = crossovers_of(*packed, request.crossovers);
  packed->code_bytes = panel_code_bytes(packed->codes, request.columns);
  packed->scale_bytes = panel_scale_bytes(format, request.columns);
  packed->bias = padded_bias(*packed, request.bias);
  // The rows that fill up the last panel, and the planes that bits are or-ed into, begin as zeros.
  const int64_t code_size = packed->panels() * packed->code_bytes;
  const int64_t scales_at = (code_size + kLine - 1) / kLine * kLine;
  packed->memory = zeroed_storage(static_cast<size_t>(scales_at + packed->panels() * packed->scale_bytes));
  packed->code_data = reinterpret_cast<const uint8_t*>(packed->memory->data);
  packed->scale_data = packed->code_data + scales_at;
  fill(request, format, *packed);
  return packed;
}

}  // namespace cardan_native

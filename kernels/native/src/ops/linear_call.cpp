#include "ops/linear_call.h"

#include "ops/linear_lines.h"

namespace cardan_native {
namespace {

constexpr int64_t kSerialElements = 1 << 15;  // fewer are converted sooner than threads wake
constexpr int64_t kRowsTogether = 16;         // rows of scratch are a multiple: tiles are read whole
constexpr float kSmallest = 1e-30f;           // groups below are taken for zeros: their inverse would overflow

int64_t padded_rows(int64_t rows) { return (rows + kRowsTogether - 1) / kRowsTogether * kRowsTogether; }

// Rows of power-of-two widths would all fall into the same sets of a cache.
int64_t float_stride(int64_t width) { return (width + 15) / 16 * 16 + 16; }

template <class Body>
void for_each_row(int64_t rows, int64_t width, Pool& pool, const Body& body) {
  if (rows * width <= kSerialElements) {
    for (int64_t row = 0; row < rows; ++row) body(row);
    return;
  }
  pool.parallel(rows, pool.even_grain(rows), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) body(row);
  });
}

template <class T>
void widen_row(const T* from, int64_t width, float* to) {
  int64_t column = 0;
  for (; column + kLanes <= width; column += kLanes) store(to + column, load(from + column));
  for (; column < width; ++column) to[column] = widen(from[column]);
}

vf magnitude(vf value) { return (vf)((vi)value & 0x7fffffff); }

// Codes of 32 elements and their scale. NaN and infinity make the scale NaN.
template <class T>
float quantize_group(const T* from, int8_t* codes) {
  typedef int8_t few_bytes __attribute__((vector_size(kLanes)));
  constexpr int kVectors = static_cast<int>(kGroup) / kLanes;
  vf values[kVectors], most = splat(0.0f), poison = splat(0.0f);
  for (int v = 0; v < kVectors; ++v) {
    values[v] = load(from + v * kLanes);
    most = larger(magnitude(values[v]), most);
    poison = poison + values[v] * 0.0f;
  }
  const float largest = max_lanes(most), inverse = largest > kSmallest ? 127.0f / largest : 0.0f;
  for (int v = 0; v < kVectors; ++v) {
    const vf shifted = values[v] * inverse + 12582912.0f;  // 1.5 * 2^23: the low bits are the rounded integer
    const vi rounded = (vi)shifted - splat_int(0x4b400000);
    const few_bytes narrow_codes = __builtin_convertvector(rounded, few_bytes);
    std::memcpy(codes + v * kLanes, &narrow_codes, sizeof narrow_codes);
  }
  const float scale = largest > kSmallest ? largest / 127.0f : 0.0f;
  return scale + sum_lanes(poison);
}

int32_t sum_codes(const int8_t* codes, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += codes[i];
  return sum;
}

template <class T>
void quantize_row(const T* from, const PackedLinear& weight, int8_t* codes, float* scales, char* sums) {
  const int64_t unit = weight.unit();
  for (int64_t group = 0; group < weight.columns / kGroup; ++group) {
    const float scale = quantize_group(from + group * kGroup, codes + group * kGroup);
    scales[group] = scale;
    for (int64_t at = group * kGroup; at < (group + 1) * kGroup; at += unit, sums += 4) {
      const int32_t sum = sum_codes(codes + at, unit), shifted = -weight.offset * sum;
      const float scaled = scale * static_cast<float>(sum);
      std::memcpy(sums, weight.has_minimums ? static_cast<const void*>(&scaled) : &shifted, 4);
    }
  }
}

template <class T>
void finish_rows(const LinearCall& call, int64_t panel, int64_t first, int64_t rows, const float* sums) {
  const int64_t column = panel * kPanel;
  const int present = static_cast<int>(std::min(kPanel, call.weight->rows - column));
  const float* bias = call.weight->bias.empty() ? nullptr : call.weight->bias.data() + column;
  for (int64_t row = 0; row < rows; ++row, sums += kPanel) {
    T* to = call.out.at<T>(first + row) + column;
    const T* residual = call.residual.data ? call.residual.at<T>(first + row) + column : nullptr;
    for (int v = 0; v < kPanelVectors && v * kLanes < present; ++v) {
      const int at = v * kLanes, count = present - at;
      vf value = load(sums + at);
      if (bias) value = value + load(bias + at);
      if (count >= kLanes) {
        if (residual) value = value + load(residual + at);
        store(to + at, value);
      } else {
        if (residual) value = value + load_part(residual + at, count);
        store_part(to + at, value, count);
      }
    }
  }
}

}  // namespace

int64_t float_rows_bytes(const Rows& x) {
  return x.dtype == DType::kF32 ? 0 : x.rows * float_stride(x.width) * 4;
}

int64_t int8_rows_bytes(const PackedLinear& weight, int64_t rows) {
  return padded_rows(rows) * (weight.columns + weight.columns / kGroup * 4 + weight.columns / weight.unit() * 4);
}

FloatRows widen_rows_of(const LinearCall& call, Pool& pool) {
  const Rows& x = call.x;
  if (x.dtype == DType::kF32) return {reinterpret_cast<const float*>(x.data), x.stride};
  auto* scratch = reinterpret_cast<float*>(call.scratch);
  const int64_t stride = float_stride(x.width);
  for_each_row(x.rows, x.width, pool, [&](int64_t row) {
    if (x.dtype == DType::kBF16)
      widen_row(x.at<bf16>(row), x.width, scratch + row * stride);
    else
      widen_row(x.at<f16>(row), x.width, scratch + row * stride);
  });
  return {scratch, stride};
}

Int8Rows quantize_rows_of(const LinearCall& call, Pool& pool) {
  const PackedLinear& weight = *call.weight;
  const Rows& x = call.x;
  const int64_t groups = weight.columns / kGroup, units = weight.columns / weight.unit(), rows = padded_rows(x.rows);
  auto* codes = reinterpret_cast<int8_t*>(call.scratch);
  auto* scales = reinterpret_cast<float*>(codes + rows * weight.columns);
  char* sums = reinterpret_cast<char*>(scales + rows * groups);
  for_each_row(x.rows, x.width, pool, [&](int64_t row) {
    int8_t* to = codes + row * weight.columns;
    float* scale = scales + row * groups;
    char* sum = sums + row * units * 4;
    if (x.dtype == DType::kF32)
      quantize_row(x.at<float>(row), weight, to, scale, sum);
    else if (x.dtype == DType::kBF16)
      quantize_row(x.at<bf16>(row), weight, to, scale, sum);
    else
      quantize_row(x.at<f16>(row), weight, to, scale, sum);
  });
  return {codes, scales, sums, weight.columns, groups, units};
}

void finish(const LinearCall& call, int64_t panel, int64_t first, int64_t rows, const float* sums) {
  switch (call.out.dtype) {
    case DType::kBF16:
      return finish_rows<bf16>(call, panel, first, rows, sums);
    case DType::kF16:
      return finish_rows<f16>(call, panel, first, rows, sums);
    default:
      return finish_rows<float>(call, panel, first, rows, sums);
  }
}

}  // namespace cardan_native

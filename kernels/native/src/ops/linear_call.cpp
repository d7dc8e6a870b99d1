#include "ops/linear_call.h"

#include "ops/linear_lines.h"
#include "ops/linear_rounding.h"

namespace cardan_native {
namespace {

constexpr int64_t kRowsAhead = 16;     // whose memory is asked for: stores wait for each other
constexpr int64_t kRowsTogether = 16;  // rows of scratch are a multiple: tiles are read whole

int64_t padded_rows(int64_t rows) { return (rows + kRowsTogether - 1) / kRowsTogether * kRowsTogether; }

// Rows of power-of-two widths would all fall into the same sets of a cache.
int64_t float_stride(int64_t width) { return (width + 15) / 16 * 16 + 16; }

template <class T>
void widen_row(const T* from, int64_t width, float* to) {
  int64_t column = 0;
  for (; column + kLanes <= width; column += kLanes) store(to + column, load(from + column));
  for (; column < width; ++column) to[column] = widen(from[column]);
}

void store_bytes(int8_t* to, vi values) {
  typedef int8_t few_bytes __attribute__((vector_size(kLanes)));
  const few_bytes bytes = __builtin_convertvector(values, few_bytes);
  std::memcpy(to, &bytes, sizeof bytes);
}

// Codes of 32 elements, in one plane or (where `upper` is not null) in two, their scale, and the sums of the codes of
// their units.
template <class T>
float quantize_group(const T* from, int8_t* codes, int8_t* upper, int64_t unit, int32_t* sums) {
  const RoundedGroup rounded = round_group(from, upper ? kInt16Steps : kInt8Steps);
  vi halves[2] = {};
  for (int v = 0; v < kGroupVectors; ++v) {
    const vi high = upper ? (rounded.codes[v] + 128) >> 8 : vi{};
    if (upper) store_bytes(upper + v * kLanes, high);
    store_bytes(codes + v * kLanes, rounded.codes[v] - (high << 8));
    halves[v * kLanes / 16] += rounded.codes[v];
  }
  sums[0] = sum_lanes(unit == kGroup ? halves[0] + halves[1] : halves[0]);
  sums[1] = sum_lanes(halves[1]);
  return rounded.scale;
}

template <class T>
void quantize_row(const T* from, const PackedLinear& weight, const Int8Rows& to) {
  const int64_t unit = weight.unit(), units = kGroup / unit;
  const bool two_planes = weight.activations == Activations::kInt16;
  auto* codes = const_cast<int8_t*>(to.codes);
  auto* scales = const_cast<float*>(to.scales);
  auto* out = static_cast<char*>(const_cast<void*>(to.sums));
  for (int64_t group = 0; group < weight.columns / kGroup; ++group, codes += kGroup, out += 4 * units) {
    int32_t sums[2];
    const float scale =
        quantize_group(from + group * kGroup, codes, two_planes ? codes + to.plane_stride : nullptr, unit, sums);
    scales[group] = scale;
    for (int64_t i = 0; i < units; ++i) {
      const int32_t shifted = offset_of(weight, sums[i]);
      const float scaled = scale * static_cast<float>(sums[i]);
      std::memcpy(out + 4 * i, weight.has_minimums ? static_cast<const void*>(&scaled) : &shifted, 4);
    }
  }
}

// Some columns of a row, all of them or the last ones.
template <bool kAll, class T>
inline void finish_part(const float* sums, const float* bias, const T* residual, T* to, int count) {
  for (int at = 0; at < (kAll ? static_cast<int>(kPanel) : count); at += kLanes) {
    vf value = load(sums + at);
    if (bias) value = value + load(bias + at);
    if (kAll || count - at >= kLanes) {
      if (residual) value = value + load(residual + at);
      store(to + at, value);
    } else {
      if (residual) value = value + load_part(residual + at, count - at);
      store_part(to + at, value, count - at);
    }
  }
}

// For memory that is soon written, or read.
template <bool kWritten>
inline void prefetch(const void* memory, int64_t bytes) {
  const char* from = static_cast<const char*>(memory);
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(from + at, kWritten);
}

// All panels of a row, then the next row: columns side by side share lines of the cache, rows may fall into one set.
template <class T>
void finish_rows(const LinearCall& call, int64_t panel, int64_t panels, int64_t first, int64_t rows, const float* sums,
                 int64_t stride) {
  const int64_t column = panel * kPanel, present = call.weight->rows - column;
  const float* bias = call.weight->bias.empty() ? nullptr : call.weight->bias.data() + column;
  const int64_t bytes = panels * kPanel * static_cast<int64_t>(sizeof(T));
  for (int64_t row = 0; row < rows; ++row) {
    if (row + kRowsAhead < rows) {
      const int64_t ahead = first + row + kRowsAhead;
      prefetch<true>(call.out.at<T>(ahead) + column, bytes);
      if (call.residual.data) prefetch<false>(call.residual.at<T>(ahead) + column, bytes);
    }
    T* to = call.out.at<T>(first + row) + column;
    const T* residual = call.residual.data ? call.residual.at<T>(first + row) + column : nullptr;
    for (int64_t at = 0; at < panels * kPanel; at += kPanel) {
      const float *from = sums + at / kPanel * stride + row * kPanel, *shift = bias ? bias + at : nullptr;
      const T* added = residual ? residual + at : nullptr;
      if (at + kPanel <= present)
        finish_part<true>(from, shift, added, to + at, 0);
      else
        finish_part<false>(from, shift, added, to + at, static_cast<int>(present - at));
    }
  }
}

}  // namespace

int64_t float_rows_bytes(const Rows& x) {
  return x.dtype == DType::kF32 ? 0 : x.rows * float_stride(x.width) * 4;
}

int64_t int8_rows_bytes(const PackedLinear& weight, int64_t rows) {
  const int64_t planes = weight.activations == Activations::kInt16 ? 2 : 1;
  const int64_t groups = weight.columns / kGroup, units = weight.columns / weight.unit();
  return padded_rows(rows) * (planes * weight.columns + 4 * groups + 4 * units);
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
  const int64_t rows = padded_rows(call.x.rows), planes = weight.activations == Activations::kInt16 ? 2 : 1;
  Int8Rows out;
  out.code_stride = weight.columns;
  out.plane_stride = rows * weight.columns;
  out.scale_stride = weight.columns / kGroup;
  out.sum_stride = weight.columns / weight.unit();
  out.codes = reinterpret_cast<const int8_t*>(call.scratch);
  out.scales = reinterpret_cast<const float*>(call.scratch + planes * out.plane_stride);
  out.sums = out.scales + rows * out.scale_stride;
  for_each_row(call.x.rows, call.x.width, pool, [&](int64_t row) {
    const Int8Rows to = rows_from(out, row);
    if (call.x.dtype == DType::kF32)
      quantize_row(call.x.at<float>(row), weight, to);
    else if (call.x.dtype == DType::kBF16)
      quantize_row(call.x.at<bf16>(row), weight, to);
    else
      quantize_row(call.x.at<f16>(row), weight, to);
  });
  return out;
}

void finish(const LinearCall& call, int64_t panel, int64_t panels, int64_t first, int64_t rows, const float* sums,
            int64_t stride) {
  switch (call.out.dtype) {
    case DType::kBF16:
      return finish_rows<bf16>(call, panel, panels, first, rows, sums, stride);
    case DType::kF16:
      return finish_rows<f16>(call, panel, panels, first, rows, sums, stride);
    default:
      return finish_rows<float>(call, panel, panels, first, rows, sums, stride);
  }
}

}  // namespace cardan_native

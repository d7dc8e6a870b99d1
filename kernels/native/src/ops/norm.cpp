#include "ops/norm.h"

#include <cmath>

#include "core/dispatch.h"
#include "core/pieces.h"
#include "simd/loops.h"

namespace cardan_native {
namespace {

// 1 / sqrt(mean(x^2) + eps)
template <class T>
float inverse_root(const T* x, int64_t width, float eps) {
  const float total = sum_of(x, width, [](vf value) { return value * value; });
  return 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
}

template <class T>
void scale_row(const T* x, const float* weight, float factor, T* out, int64_t width) {
  zip(x, weight, out, width, [factor](vf value, vf scale) { return value * factor * scale; });
}

template <class T>
void layer_norm_row(const T* x, const float* weight, const float* bias, float eps, T* out, int64_t width) {
  const float count = static_cast<float>(width);
  const float mean = sum_of(x, width, [](vf value) { return value; }) / count;
  const float variance = sum_of(x, width, [mean](vf value) { return (value - mean) * (value - mean); }) / count;
  const float factor = 1.0f / std::sqrt(variance + eps);
  int64_t column = 0;
  for (; column + kLanes <= width; column += kLanes) {
    vf value = (load(x + column) - mean) * factor * load(weight + column);
    if (bias) value += load(bias + column);
    store(out + column, value);
  }
  if (const int rest = static_cast<int>(width - column)) {
    vf value = (load_part(x + column, rest) - mean) * factor * load_part(weight + column, rest);
    if (bias) value += load_part(bias + column, rest);
    store_part(out + column, value, rest);
  }
}

void check_weight(const char* op, const char* what, const Tensor& x, const Tensor& weight) {
  expect_dtype(op, what, weight, DType::kF32);
  expect_shape(op, what, weight, {x.width()});
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, float eps) {
  check_weight("rms_norm", "weight", x, weight);
  Tensor out = Tensor::empty(x.dims(), x.dtype);
  with_float(x.dtype, "rms_norm", [&]<class T>(T) {
    dispatch({&x, &weight, &out}, [from = Lines(x), to = Rows(out), scale = weight.ptr<float>(), eps](Pool& pool) {
      pool.parallel(from.rows, rows_per_piece(from.width), [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
          const T* values = from.at<T>(row);
          scale_row(values, scale, inverse_root(values, from.width, eps), to.at<T>(row), from.width);
        }
      });
    });
  });
  return out;
}

std::pair<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, float eps) {
  check_weight("add_rms_norm", "weight", x, weight);
  expect_dtype("add_rms_norm", "residual", residual, x.dtype);
  expect_shape("add_rms_norm", "residual", residual, x.dims());
  Tensor out = Tensor::empty(x.dims(), x.dtype), total = Tensor::empty(x.dims(), x.dtype);
  with_float(x.dtype, "add_rms_norm", [&]<class T>(T) {
    dispatch({&x, &residual, &weight, &out, &total}, [a = Lines(x), b = Lines(residual), to = Rows(out),
                                                      sum = Rows(total), scale = weight.ptr<float>(), eps](Pool& pool) {
      pool.parallel(a.rows, rows_per_piece(a.width), [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
          T* values = sum.at<T>(row);
          zip(a.at<T>(row), b.at<T>(row), values, a.width, [](vf left, vf right) { return left + right; });
          scale_row(values, scale, inverse_root(values, a.width, eps), to.at<T>(row), a.width);
        }
      });
    });
  });
  return {out, total};
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor* bias, float eps) {
  check_weight("layer_norm", "weight", x, weight);
  if (bias) check_weight("layer_norm", "bias", x, *bias);
  Tensor out = Tensor::empty(x.dims(), x.dtype);
  const float* shift = bias ? bias->ptr<float>() : nullptr;
  with_float(x.dtype, "layer_norm", [&]<class T>(T) {
    dispatch({&x, &weight, bias, &out},
             [from = Lines(x), to = Rows(out), scale = weight.ptr<float>(), shift, eps](Pool& pool) {
               pool.parallel(from.rows, rows_per_piece(from.width), [&](int64_t first, int64_t last) {
                 for (int64_t row = first; row < last; ++row)
                   layer_norm_row(from.at<T>(row), scale, shift, eps, to.at<T>(row), from.width);
               });
             });
  });
  return out;
}

}  // namespace cardan_native

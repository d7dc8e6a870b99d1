#include "ops/elementwise.h"

#include <algorithm>

#include "core/dispatch.h"
#include "core/pieces.h"
#include "simd/loops.h"

namespace cardan_native {
namespace {

// out = function(x), for any float type.
template <class Function>
Tensor each(const char* op, const Tensor& x, Function function) {
  Tensor out = Tensor::empty(x.dims(), x.dtype);
  with_float(x.dtype, op, [&]<class T>(T) {
    dispatch({&x, &out}, [from = Lines(x), to = Rows(out), function](Pool& pool) {
      for_pieces(pool, from.rows, from.width, [&](int64_t row, int64_t start, int64_t count) {
        map(from.at<T>(row) + start, to.at<T>(row) + start, count, function);
      });
    });
  });
  return out;
}

// Whether b has the last axes of a.
bool is_suffix(const Tensor& a, const Tensor& b) {
  if (b.rank > a.rank) return false;
  return std::equal(b.shape.begin(), b.shape.begin() + b.rank, a.shape.begin() + (a.rank - b.rank));
}

// out = function(a, b), where b may lack leading axes.
template <class Function>
Tensor both(const char* op, const Tensor& a, const Tensor& b, Function function) {
  expect_dtype(op, "b", b, a.dtype);
  if (!is_suffix(a, b)) refuse(op, "b", "of the last axes of " + a.describe(), b);
  Tensor out = Tensor::empty(a.dims(), a.dtype);
  with_float(a.dtype, op, [&]<class T>(T) {
    dispatch({&a, &b, &out}, [left = Lines(a), right = Lines(b), to = Rows(out), function](Pool& pool) {
      for_pieces(pool, left.rows, left.width, [&](int64_t row, int64_t start, int64_t count) {
        const T* other = right.at<T>(row % right.rows) + start;
        zip(left.at<T>(row) + start, other, to.at<T>(row) + start, count, function);
      });
    });
  });
  return out;
}

// out = function(gate, up)
template <class Function>
Tensor gated(const char* op, const Tensor& gate_up, int64_t size, Function function) {
  if (gate_up.width() != 2 * size) refuse(op, "gate_up", "[..., " + std::to_string(2 * size) + "]", gate_up);
  Shape dims = gate_up.dims();
  dims.back() = size;
  Tensor out = Tensor::empty(dims, gate_up.dtype);
  with_float(gate_up.dtype, op, [&]<class T>(T) {
    dispatch({&gate_up, &out}, [from = Lines(gate_up), to = Rows(out), function](Pool& pool) {
      for_pieces(pool, to.rows, to.width, [&](int64_t row, int64_t start, int64_t count) {
        const T* gate = from.at<T>(row) + start;
        zip(gate, gate + to.width, to.at<T>(row) + start, count, function);
      });
    });
  });
  return out;
}

inline vf silu_of(vf x) { return x * sigmoid(x); }

inline vf gelu_of(vf x) { return x * normal_cdf(x); }

// With the logistic function in place of tanh: (1 + tanh(y)) / 2 = sigmoid(2 y).
inline vf gelu_by_tanh(vf x) {
  constexpr float kTwiceRoot = 1.5957691216f;  // 2 sqrt(2 / pi)
  return x * sigmoid(kTwiceRoot * fused(x * x * x, splat(0.044715f), x));
}

// Values that are no floats, one by one.
template <class From, class To, class Function>
Tensor convert(const Tensor& x, DType dtype, Function function) {
  Tensor out = Tensor::empty(x.dims(), dtype);
  dispatch({&x, &out}, [from = Lines(x), to = Rows(out), function](Pool& pool) {
    for_pieces(pool, from.rows, from.width, [&](int64_t row, int64_t start, int64_t count) {
      const From* values = from.at<From>(row) + start;
      To* results = to.at<To>(row) + start;
      for (int64_t column = 0; column < count; ++column) results[column] = function(values[column]);
    });
  });
  return out;
}

Tensor cast_floats(const Tensor& x, DType dtype) {
  Tensor out = Tensor::empty(x.dims(), dtype);
  with_float(x.dtype, "cast", [&]<class From>(From) {
    with_float(dtype, "cast", [&]<class To>(To) {
      dispatch({&x, &out}, [from = Lines(x), to = Rows(out)](Pool& pool) {
        for_pieces(pool, from.rows, from.width, [&](int64_t row, int64_t start, int64_t count) {
          map(from.at<From>(row) + start, to.at<To>(row) + start, count, [](vf value) { return value; });
        });
      });
    });
  });
  return out;
}

}  // namespace

Tensor add(const Tensor& a, const Tensor& b) {
  return both("add", a, b, [](vf left, vf right) { return left + right; });
}

Tensor mul(const Tensor& a, const Tensor& b) {
  return both("mul", a, b, [](vf left, vf right) { return left * right; });
}

Tensor scale(const Tensor& x, float factor) {
  return each("scale", x, [factor](vf value) { return value * factor; });
}

Tensor silu(const Tensor& x) {
  return each("silu", x, [](vf value) { return silu_of(value); });
}

Tensor gelu(const Tensor& x, bool approximate) {
  if (approximate) return each("gelu", x, [](vf value) { return gelu_by_tanh(value); });
  return each("gelu", x, [](vf value) { return gelu_of(value); });
}

Tensor tanh_softcap(const Tensor& x, float cap) {
  return each("tanh_softcap", x, [cap](vf value) { return cap * tanh(value / cap); });
}

Tensor silu_mul(const Tensor& gate_up, int64_t size) {
  return gated("silu_mul", gate_up, size, [](vf gate, vf up) { return silu_of(gate) * up; });
}

Tensor gelu_mul(const Tensor& gate_up, int64_t size, bool approximate) {
  if (approximate) return gated("gelu_mul", gate_up, size, [](vf gate, vf up) { return gelu_by_tanh(gate) * up; });
  return gated("gelu_mul", gate_up, size, [](vf gate, vf up) { return gelu_of(gate) * up; });
}

Tensor exponential(const Tensor& x) {
  expect_dtype("exp", "x", x, DType::kF32);
  return each("exp", x, [](vf value) { return exp(value); });
}

Tensor cast(const Tensor& x, DType dtype) {
  if (x.dtype == dtype) return x;
  if (x.dtype == DType::kI32 && dtype == DType::kF32)
    return convert<int32_t, float>(x, dtype, [](int32_t value) { return static_cast<float>(value); });
  if (x.dtype == DType::kBool && dtype == DType::kF32)
    return convert<uint8_t, float>(x, dtype, [](uint8_t value) { return value ? 1.0f : 0.0f; });
  if (x.dtype == DType::kF32 && dtype == DType::kI32)
    return convert<float, int32_t>(x, dtype, [](float value) { return static_cast<int32_t>(value); });
  return cast_floats(x, dtype);
}

}  // namespace cardan_native

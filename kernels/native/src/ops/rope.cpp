#include "ops/rope.h"

#include "core/dispatch.h"
#include "core/pieces.h"
#include "simd/vec.h"

namespace cardan_native {
namespace {

template <class T>
void turn_halves(const T* x, const float* cos, const float* sin, T* out, int64_t half) {
  const auto turn = [](vf first, vf second, vf c, vf s, vf& low, vf& high) {
    low = first * c - second * s;
    high = second * c + first * s;
  };
  vf low, high;
  int64_t at = 0;
  for (; at + kLanes <= half; at += kLanes) {
    turn(load(x + at), load(x + half + at), load(cos + at), load(sin + at), low, high);
    store(out + at, low);
    store(out + half + at, high);
  }
  if (const int rest = static_cast<int>(half - at)) {
    turn(load_part(x + at, rest), load_part(x + half + at, rest), load_part(cos + at, rest), load_part(sin + at, rest),
         low, high);
    store_part(out + at, low, rest);
    store_part(out + half + at, high, rest);
  }
}

template <class T>
void turn_neighbours(const T* x, const float* cos, const float* sin, T* out, int64_t half) {
  for (int64_t pair = 0; pair < half; ++pair) {
    const float first = widen(x[2 * pair]), second = widen(x[2 * pair + 1]);
    narrow(first * cos[pair] - second * sin[pair], out + 2 * pair);
    narrow(second * cos[pair] + first * sin[pair], out + 2 * pair + 1);
  }
}

void check(const Tensor& x, const Tensor& positions, const Tensor& cos, const Tensor& sin) {
  expect_rank("rope", "x", x, 3);
  expect_dtype("rope", "positions", positions, DType::kI32);
  expect_shape("rope", "positions", positions, {x.shape[0]});
  expect_dtype("rope", "cos", cos, DType::kF32);
  expect_rank("rope", "cos", cos, 2);
  expect_dtype("rope", "sin", sin, DType::kF32);
  expect_shape("rope", "sin", sin, cos.dims());
  if (2 * cos.width() > x.width())
    refuse("rope", "cos", "at most " + std::to_string(x.width() / 2) + " wide, half a head", cos);
  expect_indices("rope", "positions", positions, cos.shape[0]);
}

}  // namespace

Tensor rope(const Tensor& x, const Tensor& positions, const Tensor& cos, const Tensor& sin, bool interleaved) {
  check(x, positions, cos, sin);
  Tensor out = Tensor::empty(x.dims(), x.dtype);
  const int64_t heads = x.shape[1], half = cos.width(), rest = x.width() - 2 * half;
  with_float(x.dtype, "rope", [&]<class T>(T) {
    dispatch({&x, &positions, &cos, &sin, &out},
             [from = Lines(x), to = Rows(out), places = positions.ptr<int32_t>(), cosines = Rows(cos),
              sines = Rows(sin), heads, half, rest, interleaved](Pool& pool) {
               pool.parallel(from.rows, rows_per_piece(from.width), [&](int64_t first, int64_t last) {
                 for (int64_t row = first; row < last; ++row) {
                   const int64_t place = places[row / heads];
                   const T* values = from.at<T>(row);
                   T* turned = to.at<T>(row);
                   const float *c = cosines.at<float>(place), *s = sines.at<float>(place);
                   if (interleaved)
                     turn_neighbours(values, c, s, turned, half);
                   else
                     turn_halves(values, c, s, turned, half);
                   if (rest) std::memcpy(turned + 2 * half, values + 2 * half, sizeof(T) * static_cast<size_t>(rest));
                 }
               });
             });
  });
  return out;
}

}  // namespace cardan_native

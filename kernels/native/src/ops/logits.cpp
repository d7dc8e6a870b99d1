#include "ops/logits.h"

#include <algorithm>
#include <cmath>

#include "core/dispatch.h"
#include "core/pieces.h"
#include "simd/loops.h"

namespace cardan_native {
namespace {

int64_t pieces_of(int64_t width) { return (width + kPieceElements - 1) / kPieceElements; }

Shape without_last(const Tensor& x) {
  Shape dims = x.dims();
  dims.pop_back();
  if (dims.empty()) dims.push_back(1);
  return dims;
}

// Part of a sum of exponentials: that of exp(x - shift).
struct Share {
  float shift, sum;
};

float largest(const float* x, int64_t count) {
  vf most = splat(-INFINITY);
  int64_t column = 0;
  for (; column + kLanes <= count; column += kLanes) most = larger(load(x + column), most);
  float result = max_lanes(most);
  for (; column < count; ++column) result = x[column] > result ? x[column] : result;
  return result;
}

Share share_of(const float* x, int64_t count) {
  const float top = largest(x, count), shift = std::isfinite(top) ? top : 0.0f;
  return {shift, sum_of(x, count, [shift](vf value) { return exp(value - shift); })};
}

// The logarithm of a sum of exponentials in two parts: the shift, which is as large as x, and a small rest.
struct Logarithm {
  float shift, rest;
};

Logarithm joined(const Share* shares, int64_t count) {
  float shift = -INFINITY;
  for (int64_t i = 0; i < count; ++i)
    if (shares[i].sum != 0.0f) shift = std::max(shift, shares[i].shift);
  if (shift == -INFINITY) return {0.0f, -INFINITY};
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i)
    if (shares[i].sum != 0.0f) sum += shares[i].sum * std::exp(static_cast<double>(shares[i].shift) - shift);
  return {shift, static_cast<float>(std::log(sum))};
}

// Logarithms of the sums of exponentials, into `to`, one a row.
void logsumexp_rows(Pool& pool, const Lines& from, Share* shares, Logarithm* to) {
  const int64_t pieces = pieces_of(from.width);
  for_pieces(pool, from.rows, from.width, [&](int64_t row, int64_t start, int64_t count) {
    shares[row * pieces + start / kPieceElements] = share_of(from.at<float>(row) + start, count);
  });
  for (int64_t row = 0; row < from.rows; ++row) to[row] = joined(shares + row * pieces, pieces);
}

// Room for one entry of a type for each piece.
template <class Entry>
Tensor room_for(const Tensor& x) {
  return Tensor::empty({std::max<int64_t>(1, x.rows() * pieces_of(x.width())), static_cast<int64_t>(sizeof(Entry))},
                       DType::kU8);
}

void check(const char* op, const Tensor& x) {
  expect_dtype(op, "x", x, DType::kF32);
  if (x.width() == 0) refuse(op, "x", "at least one column wide", x);
}

// The first entry of a row that equals `top`, given the largest of each piece; 0 where there is none, among NaN.
int32_t place_of(const float* x, int64_t width, const float* largest, float top) {
  for (int64_t start = 0; start < width; start += kPieceElements) {
    if (largest[start / kPieceElements] != top) continue;
    const int64_t stop = std::min(start + kPieceElements, width);
    for (int64_t column = start; column < stop; ++column)
      if (x[column] == top) return static_cast<int32_t>(column);
  }
  return 0;
}

}  // namespace

Tensor logsumexp(const Tensor& x) {
  check("logsumexp", x);
  Tensor out = Tensor::empty(without_last(x), DType::kF32);
  const Tensor shares = room_for<Share>(x), logs = room_for<Logarithm>(x);
  dispatch({&x, &shares, &logs, &out}, [from = Lines(x), shares = shares.ptr<Share>(), logs = logs.ptr<Logarithm>(),
                                        to = out.ptr<float>()](Pool& pool) {
    logsumexp_rows(pool, from, shares, logs);
    for (int64_t row = 0; row < from.rows; ++row) to[row] = logs[row].shift + logs[row].rest;
  });
  return out;
}

Tensor log_softmax(const Tensor& x) {
  check("log_softmax", x);
  Tensor out = Tensor::empty(x.dims(), DType::kF32);
  const Tensor shares = room_for<Share>(x), logs = room_for<Logarithm>(x);
  dispatch({&x, &shares, &logs, &out}, [from = Lines(x), shares = shares.ptr<Share>(), logs = logs.ptr<Logarithm>(),
                                        to = Rows(out)](Pool& pool) {
    logsumexp_rows(pool, from, shares, logs);
    for_pieces(pool, from.rows, from.width, [&](int64_t row, int64_t start, int64_t count) {
      const Logarithm log = logs[row];  // taken off in its two parts, so that likely entries keep their digits
      map(from.at<float>(row) + start, to.at<float>(row) + start, count,
          [log](vf value) { return (value - log.shift) - log.rest; });
    });
  });
  return out;
}

Tensor argmax(const Tensor& x) {
  check("argmax", x);
  Tensor out = Tensor::empty(without_last(x), DType::kI32);
  const Tensor room = room_for<float>(x);
  dispatch({&x, &room, &out}, [from = Lines(x), room = room.ptr<float>(), to = out.ptr<int32_t>()](Pool& pool) {
    const int64_t pieces = pieces_of(from.width);
    for_pieces(pool, from.rows, from.width, [&](int64_t row, int64_t start, int64_t count) {
      room[row * pieces + start / kPieceElements] = largest(from.at<float>(row) + start, count);
    });
    for (int64_t row = 0; row < from.rows; ++row) {
      const float* tops = room + row * pieces;
      to[row] = place_of(from.at<float>(row), from.width, tops, *std::max_element(tops, tops + pieces));
    }
  });
  return out;
}

Tensor cumsum(const Tensor& x) {
  expect_dtype("cumsum", "x", x, DType::kF32);
  Tensor out = Tensor::empty(x.dims(), DType::kF32);
  dispatch({&x, &out}, [from = Lines(x), to = Rows(out)](Pool& pool) {
    pool.parallel(from.rows, rows_per_piece(from.width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const float* values = from.at<float>(row);
        float* sums = to.at<float>(row);
        double sum = 0.0;
        for (int64_t column = 0; column < from.width; ++column) {
          sum += values[column];
          sums[column] = static_cast<float>(sum);
        }
      }
    });
  });
  return out;
}

}  // namespace cardan_native

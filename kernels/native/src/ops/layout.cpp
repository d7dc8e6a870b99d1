#include "ops/layout.h"

#include "core/dispatch.h"
#include "core/pieces.h"

namespace cardan_native {
namespace {

// Elements of one entry of the first axis.
int64_t row_elements(const Tensor& x) {
  int64_t count = 1;
  for (int axis = 1; axis < x.rank; ++axis) count *= x.shape[axis];
  return count;
}

Tensor contiguous(const Tensor& x) { return x.contiguous() ? x : x.contiguous_copy(); }

// Entries of the first axis as rows of bytes.
struct Records {
  char* data;
  int64_t bytes;

  explicit Records(const Tensor& x)
      : data(x.data), bytes(row_elements(x) * static_cast<int64_t>(size_of(x.dtype))) {}
  char* at(int64_t row) const { return data + row * bytes; }
};

void check_index(const char* op, const Tensor& x, const Tensor& index) {
  expect_rank(op, "index", index, 1);
  expect_indices(op, "index", index, x.shape[0]);
}

}  // namespace

Tensor concat(const std::vector<Tensor>& parts) {
  if (parts.empty()) throw std::invalid_argument("concat: there must be at least one tensor to join, got none");
  const Tensor& first = parts[0];
  Shape dims = first.dims();
  dims.back() = 0;
  for (const Tensor& part : parts) {
    expect_dtype("concat", "each tensor", part, first.dtype);
    Shape expected = first.dims();
    expected.back() = part.width();
    expect_shape("concat", "each tensor", part, expected);
    dims.back() += part.width();
  }
  Tensor out = Tensor::empty(dims, first.dtype);
  std::vector<const Tensor*> used{&out};
  std::vector<Lines> from;
  for (const Tensor& part : parts) {
    used.push_back(&part);
    from.emplace_back(part);
  }
  const int64_t item = static_cast<int64_t>(size_of(first.dtype));
  dispatch(std::span<const Tensor* const>(used), [from, to = Rows(out), item](Pool& pool) {
    pool.parallel(to.rows, rows_per_piece(to.width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        char* next = to.data + row * to.stride * item;
        for (const Lines& part : from) {
          const int64_t bytes = part.width * item;
          std::memcpy(next, part.data + part.offset(row) * item, static_cast<size_t>(bytes));
          next += bytes;
        }
      }
    });
  });
  return out;
}

Tensor gather_rows(const Tensor& x, const Tensor& index) {
  check_index("gather_rows", x, index);
  const Tensor source = contiguous(x);
  Shape dims = x.dims();
  dims[0] = index.shape[0];
  Tensor out = Tensor::empty(dims, x.dtype);
  dispatch({&source, &index, &out}, [from = Records(source), to = Records(out), rows = index.ptr<int32_t>(),
                                     count = index.shape[0]](Pool& pool) {
    pool.parallel(count, rows_per_piece(from.bytes), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row)
        std::memcpy(to.at(row), from.at(rows[row]), static_cast<size_t>(from.bytes));
    });
  });
  return out;
}

Tensor permute_columns(const Tensor& x, const Tensor& order) {
  expect_shape("permute_columns", "order", order, {x.width()});
  expect_indices("permute_columns", "order", order, x.width());
  const Tensor columns = contiguous(order);
  Tensor out = Tensor::empty(x.dims(), x.dtype);
  with_float(x.dtype, "permute_columns", [&]<class T>(T) {
    dispatch({&x, &columns, &out}, [from = Lines(x), to = Rows(out), index = columns.ptr<int32_t>()](Pool& pool) {
      for_pieces(pool, to.rows, to.width, [&](int64_t row, int64_t first, int64_t count) {
        const T* source = from.at<T>(row);
        T* target = to.at<T>(row) + first;
        for (int64_t i = 0; i < count; ++i) target[i] = source[index[first + i]];
      });
    });
  });
  return out;
}

Tensor scatter_rows(const Tensor& x, const Tensor& index, const Tensor& values) {
  check_index("scatter_rows", x, index);
  expect_dtype("scatter_rows", "values", values, x.dtype);
  Shape dims = x.dims();
  dims[0] = index.shape[0];
  expect_shape("scatter_rows", "values", values, dims);
  const Tensor target = contiguous(x), source = contiguous(values);
  dispatch({&target, &index, &source}, [from = Records(source), to = Records(target), rows = index.ptr<int32_t>(),
                                        count = index.shape[0]](Pool&) {
    for (int64_t row = 0; row < count; ++row)
      std::memcpy(to.at(rows[row]), from.at(row), static_cast<size_t>(from.bytes));
  });
  return target;
}

}  // namespace cardan_native

#include "core/tensor.h"

#include "core/dispatch.h"
#include "core/pieces.h"

namespace cardan_native {
namespace {

Tensor shaped(const Shape& dims, DType dtype) {
  if (dims.empty() || dims.size() > 4) throw std::invalid_argument("a tensor has 1 to 4 axes");
  Tensor out;
  out.dtype = dtype;
  out.rank = static_cast<int>(dims.size());
  int64_t stride = 1;
  for (int axis = out.rank - 1; axis >= 0; --axis) {
    if (dims[axis] < 0) throw std::invalid_argument("a tensor's axes are 0 or longer");
    out.shape[axis] = dims[axis];
    out.strides[axis] = stride;
    stride *= dims[axis];
  }
  return out;
}

Tensor over(const Shape& dims, DType dtype, Allocator& allocator) {
  Tensor out = shaped(dims, dtype);
  out.storage = allocator.take(static_cast<size_t>(out.size()) * size_of(dtype));
  out.data = out.storage->data;
  return out;
}

std::string text_of(const Shape& dims) {
  std::string text = "[";
  for (size_t axis = 0; axis < dims.size(); ++axis) text += (axis ? ", " : "") + std::to_string(dims[axis]);
  return text + "]";
}

// Leading axes of a tensor that count, outermost first, those that lie at one stride joined.
struct Axis {
  int64_t count, stride;
};
std::vector<Axis> leading_axes(const Tensor& x) {
  std::vector<Axis> axes;
  for (int axis = 0; axis + 1 < x.rank; ++axis) {
    if (x.shape[axis] == 1) continue;
    if (!axes.empty() && axes.back().stride == x.shape[axis] * x.strides[axis]) {
      axes.back() = {axes.back().count * x.shape[axis], x.strides[axis]};
    } else {
      axes.push_back({x.shape[axis], x.strides[axis]});
    }
  }
  return axes;
}

[[noreturn]] void refuse_strides(const Tensor& x, const char* number) {
  throw std::invalid_argument("rows lie at more than " + std::string(number) + " in " + x.describe() +
                              "; copy it first");
}

}  // namespace

Tensor Tensor::empty(const Shape& dims, DType dtype) { return over(dims, dtype, *current_allocator()); }

Tensor Tensor::lasting(const Shape& dims, DType dtype) { return over(dims, dtype, *process_allocator()); }

Tensor Tensor::zeros(const Shape& dims, DType dtype) {
  Tensor out = shaped(dims, dtype);
  out.storage = zeroed_storage(static_cast<size_t>(out.size()) * size_of(dtype));
  out.data = out.storage->data;
  return out;
}

int64_t Tensor::size() const {
  int64_t count = 1;
  for (int axis = 0; axis < rank; ++axis) count *= shape[axis];
  return count;
}

int64_t Tensor::rows() const {
  int64_t count = 1;
  for (int axis = 0; axis + 1 < rank; ++axis) count *= shape[axis];
  return count;
}

int64_t Tensor::row_stride() const {
  if (rows() == 0) return width();
  const std::vector<Axis> axes = leading_axes(*this);
  if (axes.size() > 1) refuse_strides(*this, "one stride");
  return axes.empty() ? width() : axes[0].stride;
}

bool Tensor::contiguous() const {
  int64_t stride = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    if (shape[axis] != 1 && strides[axis] != stride) return false;
    stride *= shape[axis];
  }
  return true;
}

std::string Tensor::describe() const { return std::string(name_of(dtype)) + " " + text_of(dims()); }

Tensor Tensor::columns(int64_t start, int64_t count) const {
  if (start < 0 || count < 0 || start + count > width())
    throw std::invalid_argument("columns " + std::to_string(start) + " to " + std::to_string(start + count) +
                                " are not all in " + describe());
  Tensor out = *this;
  out.data += start * static_cast<int64_t>(size_of(dtype));
  out.shape[rank - 1] = count;
  return out;
}

Tensor Tensor::split_heads(int64_t heads) const {
  if (rank >= 4 || heads < 1 || width() % heads)
    throw std::invalid_argument(describe() + " does not split into " + std::to_string(heads) + " heads");
  Tensor out = *this;
  const int64_t dim = width() / heads;
  out.rank = rank + 1;
  out.shape[rank - 1] = heads;
  out.strides[rank - 1] = dim;
  out.shape[rank] = dim;
  out.strides[rank] = 1;
  return out;
}

Tensor Tensor::merge_heads() const {
  if (rank < 2) throw std::invalid_argument(describe() + " has no heads to merge");
  Tensor out = shape[rank - 2] == 1 || strides[rank - 2] == shape[rank - 1] ? *this : contiguous_copy();
  out.rank = rank - 1;
  out.shape[rank - 2] = shape[rank - 2] * shape[rank - 1];
  out.strides[rank - 2] = 1;
  out.shape[rank - 1] = out.strides[rank - 1] = 1;
  return out;
}

Tensor Tensor::reshaped(const Shape& dims) const {
  Shape full = dims;
  int64_t known = 1, open = -1;
  for (size_t axis = 0; axis < full.size(); ++axis) {
    if (full[axis] == -1 && open < 0)
      open = static_cast<int64_t>(axis);
    else
      known *= full[axis];
  }
  if (open >= 0) full[open] = known ? size() / known : 0;
  Tensor out = shaped(full, dtype);
  if (out.size() != size()) throw std::invalid_argument(describe() + " does not reshape to " + text_of(dims));
  const Tensor source = contiguous() ? *this : contiguous_copy();
  out.storage = source.storage;
  out.data = source.data;
  return out;
}

Tensor Tensor::contiguous_copy() const {
  Tensor out = empty(dims(), dtype);
  std::array<Axis, 3> outer{{{1, 0}, {1, 0}, {1, 0}}};
  for (int axis = 0; axis + 1 < rank; ++axis) outer[4 - rank + axis] = {shape[axis], strides[axis]};
  const int64_t item = static_cast<int64_t>(size_of(dtype));
  dispatch({this, &out}, [from = data, to = out.data, outer, rows = rows(), bytes = width() * item, item](Pool& pool) {
    const int64_t second = outer[1].count, third = outer[2].count;
    pool.parallel(rows, rows_per_piece(bytes / item), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const int64_t i = row / (second * third), j = row / third % second, k = row % third;
        const int64_t start = i * outer[0].stride + j * outer[1].stride + k * outer[2].stride;
        std::memcpy(to + row * bytes, from + start * item, static_cast<size_t>(bytes));
      }
    });
  });
  return out;
}

Lines::Lines(const Tensor& x) : data(x.data), rows(x.rows()), width(x.width()), inner(rows), stride(x.width()) {
  if (rows == 0) return;
  const std::vector<Axis> axes = leading_axes(x);
  if (axes.size() > 2) refuse_strides(x, "two strides");
  if (axes.empty()) return;
  inner = axes.back().count;
  stride = axes.back().stride;
  outer_stride = axes.front().stride;
}

void refuse(const char* op, const char* what, const std::string& expected, const Tensor& got) {
  throw std::invalid_argument(std::string(op) + ": " + what + " must be " + expected + ", got " + got.describe());
}

void expect_dtype(const char* op, const char* what, const Tensor& got, DType dtype) {
  if (got.dtype != dtype) refuse(op, what, name_of(dtype), got);
}

void expect_rank(const char* op, const char* what, const Tensor& got, int rank) {
  if (got.rank != rank) refuse(op, what, "of " + std::to_string(rank) + " axes", got);
}

void expect_shape(const char* op, const char* what, const Tensor& got, const Shape& dims) {
  if (got.dims() != dims) refuse(op, what, text_of(dims), got);
}

void expect_indices(const char* op, const char* what, const Tensor& got, int64_t limit) {
  expect_dtype(op, what, got, DType::kI32);
  const Lines lines(got);
  for (int64_t row = 0; row < lines.rows; ++row)
    for (int64_t column = 0; column < lines.width; ++column) {
      const int64_t index = lines.at<int32_t>(row)[column];
      if (index < 0 || index >= limit)
        throw std::out_of_range(std::string(op) + ": " + what + " must lie in 0 to " + std::to_string(limit - 1) +
                                ", got " + std::to_string(index));
    }
}

}  // namespace cardan_native

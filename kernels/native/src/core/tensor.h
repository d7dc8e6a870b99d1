// A tensor: a type, a shape, strides, and a share in a block of memory.
//
// Its last axis is always contiguous; views (`columns`, `split_heads`) have gaps between rows only. Up to four axes.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "core/storage.h"
#include "core/types.h"

namespace cardan_native {

using Shape = std::vector<int64_t>;

struct Tensor {
  std::shared_ptr<Storage> storage;
  char* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  std::array<int64_t, 4> shape{1, 1, 1, 1};
  std::array<int64_t, 4> strides{1, 1, 1, 1};  // in elements

  // Memory for the output of an op, with whatever was in it: while a graph records, the graph's.
  static Tensor empty(const Shape& shape, DType dtype);
  // Memory that no replay fills again, with whatever was in it.
  static Tensor lasting(const Shape& shape, DType dtype);
  // Zeros whose pages are committed as they are touched; lasting, too.
  static Tensor zeros(const Shape& shape, DType dtype);

  int64_t size() const;
  int64_t width() const { return rank ? shape[rank - 1] : 1; }
  // Rows of the tensor seen as [rows, width]; all leading axes together.
  int64_t rows() const;
  // Elements from one row to the next when seen as [rows, width].
  // Throws std::invalid_argument where leading axes do not lie at one stride.
  int64_t row_stride() const;
  bool contiguous() const;
  Shape dims() const { return Shape(shape.begin(), shape.begin() + rank); }
  std::string describe() const;  // "bfloat16 [3, 64]"

  // The same memory.
  Tensor columns(int64_t start, int64_t count) const;  // of the last axis
  Tensor split_heads(int64_t heads) const;             // [..., heads * dim] to [..., heads, dim]
  // The same memory where that can be, else a copy.
  Tensor merge_heads() const;  // [..., heads, dim] to [..., heads * dim]
  Tensor reshaped(const Shape& dims) const;
  Tensor contiguous_copy() const;

  template <class T>
  T* ptr() const {
    return reinterpret_cast<T*>(data);
  }
};

// Throws std::invalid_argument: "<op>: <what> must be <expected>, got <tensor>".
[[noreturn]] void refuse(const char* op, const char* what, const std::string& expected, const Tensor& got);
void expect_dtype(const char* op, const char* what, const Tensor& got, DType dtype);
void expect_rank(const char* op, const char* what, const Tensor& got, int rank);
void expect_shape(const char* op, const char* what, const Tensor& got, const Shape& dims);
// Throws std::out_of_range where an int32 tensor holds an index below 0, or one that is not below `limit`. Only what it
// holds now is looked at: a replay trusts whoever fills it.
void expect_indices(const char* op, const char* what, const Tensor& got, int64_t limit);

// A tensor without a share in its memory, seen as [rows, width]: what a kernel keeps. A recorded kernel's memory is
// kept alive by its graph.
struct Rows {
  char* data = nullptr;
  int64_t rows = 0, width = 0, stride = 0;
  DType dtype = DType::kF32;

  Rows() = default;
  explicit Rows(const Tensor& x)
      : data(x.data), rows(x.rows()), width(x.width()), stride(x.row_stride()), dtype(x.dtype) {}

  template <class T>
  T* at(int64_t row) const {
    return reinterpret_cast<T*>(data) + row * stride;
  }
};

// As `Rows`, but rows may lie at two strides, as those of a view of some heads do: `inner` rows at `stride` make up a
// group, and groups lie at `outer_stride`. Throws std::invalid_argument where there are more.
struct Lines {
  char* data = nullptr;
  int64_t rows = 0, width = 0, inner = 0, stride = 0, outer_stride = 0;

  Lines() = default;
  explicit Lines(const Tensor& x);

  // Elements from the first row to this one.
  int64_t offset(int64_t row) const {
    return inner == rows ? row * stride : row / inner * outer_stride + row % inner * stride;
  }

  template <class T>
  T* at(int64_t row) const {
    return reinterpret_cast<T*>(data) + offset(row);
  }
};

}  // namespace cardan_native

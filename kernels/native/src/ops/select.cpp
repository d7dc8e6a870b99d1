#include "ops/select.h"

#include <functional>

#include "core/dispatch.h"
#include "core/pieces.h"
#include "simd/loops.h"

namespace cardan_native {
namespace {

// An operand as kernels keep it.
template <class T>
struct Right {
  Lines lines;
  T number{};
  bool whole = false;  // one value for each element, else one for each row

  // The value of a whole row, where it is one.
  T of_row(int64_t row) const { return lines.data ? *lines.at<T>(row) : number; }
};

template <class T>
Right<T> right_of(const char* op, const Tensor& a, const Operand& b) {
  Right<T> right;
  if (const float* number = std::get_if<float>(&b)) {
    right.number = static_cast<T>(*number);
    return right;
  }
  const Tensor& tensor = std::get<Tensor>(b);
  expect_dtype(op, "b", tensor, a.dtype);
  right.whole = tensor.dims() == a.dims();
  Shape column = a.dims();
  column.back() = 1;
  if (!right.whole && tensor.dims() != column)
    refuse(op, "b", "of the shape of " + a.describe() + ", or a column", tensor);
  right.lines = Lines(tensor);
  return right;
}

const Tensor* tensor_of(const Operand& b) { return std::get_if<Tensor>(&b); }

// out = function(a, b) with plain loops, which the compiler turns into vectors.
template <class T, class To, class Function>
Tensor combine(const char* op, const Tensor& a, const Operand& b, DType dtype, Function function) {
  Tensor out = Tensor::empty(a.dims(), dtype);
  dispatch({&a, tensor_of(b), &out},
           [left = Lines(a), right = right_of<T>(op, a, b), to = Rows(out), function](Pool& pool) {
             for_pieces(pool, left.rows, left.width, [&](int64_t row, int64_t start, int64_t count) {
               const T* values = left.at<T>(row) + start;
               To* results = to.at<To>(row) + start;
               if (right.whole) {
                 const T* others = right.lines.template at<T>(row) + start;
                 for (int64_t i = 0; i < count; ++i) results[i] = function(values[i], others[i]);
               } else {
                 const T other = right.of_row(row);
                 for (int64_t i = 0; i < count; ++i) results[i] = function(values[i], other);
               }
             });
           });
  return out;
}

template <class T>
void choose(const uint8_t* condition, const T* a, const Right<T>& b, int64_t row, int64_t start, int64_t count,
            T* out) {
  if (b.whole) {
    const T* others = b.lines.template at<T>(row) + start;
    for (int64_t i = 0; i < count; ++i) out[i] = condition[i] ? a[i] : others[i];
  } else {
    const T other = b.of_row(row);
    for (int64_t i = 0; i < count; ++i) out[i] = condition[i] ? a[i] : other;
  }
}

template <class T>
Tensor where_of(const Tensor& condition, const Tensor& a, const Operand& b) {
  Shape column = a.dims();
  column.back() = 1;
  const bool by_row = condition.dims() == column && column != a.dims();
  if (!by_row) expect_shape("where", "condition", condition, a.dims());
  Tensor out = Tensor::empty(a.dims(), a.dtype);
  dispatch({&condition, &a, tensor_of(b), &out}, [chosen = Lines(condition), left = Lines(a), to = Rows(out), by_row,
                                                  right = right_of<T>("where", a, b)](Pool& pool) {
    for_pieces(pool, left.rows, left.width, [&](int64_t row, int64_t start, int64_t count) {
      const T* values = left.at<T>(row) + start;
      T* results = to.at<T>(row) + start;
      if (!by_row) {
        choose(chosen.at<uint8_t>(row) + start, values, right, row, start, count, results);
        return;
      }
      const uint8_t one = *chosen.at<uint8_t>(row);
      for (int64_t i = 0; i < count; ++i) choose(&one, values + i, right, row, start + i, 1, results + i);
    });
  });
  return out;
}

// A loop of its own for each relation, chosen once.
template <class Function>
Tensor compared(const Tensor& a, const Operand& b, Function function) {
  return combine<float, uint8_t>("compare", a, b, DType::kBool, [function](float left, float right) {
    return static_cast<uint8_t>(function(left, right));
  });
}

}  // namespace

Tensor where(const Tensor& condition, const Tensor& a, const Operand& b) {
  expect_dtype("where", "condition", condition, DType::kBool);
  if (a.dtype == DType::kI32) return where_of<int32_t>(condition, a, b);
  if (a.dtype != DType::kF32) refuse("where", "a", "float32 or int32", a);
  return where_of<float>(condition, a, b);
}

Tensor compare(const Tensor& a, const std::string& relation, const Operand& b) {
  expect_dtype("compare", "a", a, DType::kF32);
  if (relation == "<") return compared(a, b, std::less<float>());
  if (relation == "<=") return compared(a, b, std::less_equal<float>());
  if (relation == ">") return compared(a, b, std::greater<float>());
  if (relation == ">=") return compared(a, b, std::greater_equal<float>());
  if (relation == "==") return compared(a, b, std::equal_to<float>());
  if (relation == "!=") return compared(a, b, std::not_equal_to<float>());
  throw std::invalid_argument("compare: relation must be one of <, <=, >, >=, == and !=, got '" + relation + "'");
}

Tensor arithmetic(const Tensor& a, const std::string& operation, const Operand& b) {
  expect_dtype("arithmetic", "a", a, DType::kF32);
  const auto with = [&](auto function) {
    return combine<float, float>("arithmetic", a, b, DType::kF32, function);
  };
  if (operation == "+") return with(std::plus<float>());
  if (operation == "-") return with(std::minus<float>());
  if (operation == "*") return with(std::multiplies<float>());
  if (operation == "/") return with(std::divides<float>());
  throw std::invalid_argument("arithmetic: operation must be one of +, -, * and /, got '" + operation + "'");
}

Tensor is_nan(const Tensor& x) {
  expect_dtype("is_nan", "x", x, DType::kF32);
  Shape dims = x.dims();
  dims.pop_back();
  if (dims.empty()) dims.push_back(1);
  Tensor out = Tensor::empty(dims, DType::kBool);
  dispatch({&x, &out}, [from = Lines(x), to = out.ptr<uint8_t>()](Pool& pool) {
    pool.parallel(from.rows, rows_per_piece(from.width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const float* values = from.at<float>(row);
        int32_t found = 0;
        for (int64_t i = 0; i < from.width; ++i) found |= values[i] != values[i];
        to[row] = found != 0;
      }
    });
  });
  return out;
}

Tensor take_columns(const Tensor& x, const Tensor& index) {
  if (size_of(x.dtype) != 4) refuse("take_columns", "x", "float32 or int32", x);
  expect_rank("take_columns", "x", x, 2);
  expect_rank("take_columns", "index", index, 2);
  expect_shape("take_columns", "index", index, {x.shape[0], index.shape[1]});
  expect_indices("take_columns", "index", index, x.width());
  Tensor out = Tensor::empty(index.dims(), x.dtype);
  dispatch({&x, &index, &out}, [from = Rows(x), places = Rows(index), to = Rows(out)](Pool& pool) {
    pool.parallel(to.rows, rows_per_piece(to.width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const uint32_t* values = from.at<uint32_t>(row);
        const int32_t* columns = places.at<int32_t>(row);
        uint32_t* results = to.at<uint32_t>(row);
        for (int64_t i = 0; i < to.width; ++i) results[i] = values[columns[i]];
      }
    });
  });
  return out;
}

Tensor scatter_add(const Tensor& x, const Tensor& rows, const Tensor& columns, const Tensor& values) {
  expect_dtype("scatter_add", "x", x, DType::kF32);
  expect_rank("scatter_add", "x", x, 2);
  expect_rank("scatter_add", "rows", rows, 1);
  expect_shape("scatter_add", "columns", columns, rows.dims());
  expect_dtype("scatter_add", "values", values, DType::kF32);
  expect_shape("scatter_add", "values", values, rows.dims());
  expect_indices("scatter_add", "rows", rows, x.shape[0]);
  expect_indices("scatter_add", "columns", columns, x.width());
  const Tensor target = x.contiguous() ? x : x.contiguous_copy();
  dispatch({&target, &rows, &columns, &values},
           [to = Rows(target), at = rows.ptr<int32_t>(), places = columns.ptr<int32_t>(),
            amounts = values.ptr<float>(), count = rows.shape[0]](Pool&) {
             for (int64_t i = 0; i < count; ++i) to.at<float>(at[i])[places[i]] += amounts[i];
           });
  return target;
}

Tensor unpack_bits(const Tensor& mask, int64_t columns) {
  expect_dtype("unpack_bits", "mask", mask, DType::kI32);
  expect_rank("unpack_bits", "mask", mask, 2);
  if (columns < 0 || (columns + 31) / 32 > mask.width())
    refuse("unpack_bits", "mask", "at least " + std::to_string((columns + 31) / 32) + " words wide", mask);
  Tensor out = Tensor::empty({mask.shape[0], columns}, DType::kBool);
  dispatch({&mask, &out}, [from = Rows(mask), to = Rows(out)](Pool& pool) {
    for_pieces(pool, to.rows, to.width, [&](int64_t row, int64_t start, int64_t count) {
      const uint32_t* words = from.at<uint32_t>(row);
      uint8_t* results = to.at<uint8_t>(row);
      for (int64_t i = start; i < start + count; ++i) results[i] = words[i >> 5] >> (i & 31) & 1;
    });
  });
  return out;
}

}  // namespace cardan_native

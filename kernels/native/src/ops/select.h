// What samplers do to rows of scores, element by element and place by place. Floats are float32.
#pragma once

#include <string>
#include <utility>
#include <variant>

#include "core/tensor.h"

namespace cardan_native {

// A number, or a tensor of the same shape, or one whose last axis is 1 and which stands for a whole row.
using Operand = std::variant<Tensor, float>;

// a where `condition: bool` holds, else b; of float32 or int32. The condition may be [rows, 1], too.
Tensor where(const Tensor& condition, const Tensor& a, const Operand& b);

// Bool: a < b, or "<=", ">", ">=", "==", "!=". Throws std::invalid_argument for another relation.
Tensor compare(const Tensor& a, const std::string& relation, const Operand& b);

// a + b, or "-", "*", "/". Throws std::invalid_argument for another operation.
Tensor arithmetic(const Tensor& a, const std::string& operation, const Operand& b);

// Bool [rows]: whether a row holds a NaN.
Tensor is_nan(const Tensor& x);

// x[i, index[i, j]] of 4-byte elements. Throws std::out_of_range for a column that x has not.
Tensor take_columns(const Tensor& x, const Tensor& index);

// Adds `values: float32 [m]` at (rows, columns), one after the other, in place where x is contiguous. Throws
// std::out_of_range for a place that x has not.
Tensor scatter_add(const Tensor& x, const Tensor& rows, const Tensor& columns, const Tensor& values);

// Bool [rows, columns]: bit j & 31 of word j >> 5 of `mask: int32 [rows, words]`.
Tensor unpack_bits(const Tensor& mask, int64_t columns);

}  // namespace cardan_native

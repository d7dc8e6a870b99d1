// Ops that only move elements, of any type.
#pragma once

#include <vector>

#include "core/tensor.h"

namespace cardan_native {

// Joined along the last axis; all have one type and the same leading axes.
Tensor concat(const std::vector<Tensor>& parts);

// Rows `index: int32 [n]` of the first axis of x. Throws std::out_of_range for an index that x has not.
Tensor gather_rows(const Tensor& x, const Tensor& index);

// Columns `order: int32 [width]` of x, of a float type. Throws std::out_of_range for a column that x has not.
Tensor permute_columns(const Tensor& x, const Tensor& order);

// x with rows `index: int32 [n]` replaced by those of `values`, in place where x is contiguous; of a row that is named
// twice the last value stays. Throws std::out_of_range for an index that x has not.
Tensor scatter_rows(const Tensor& x, const Tensor& index, const Tensor& values);

}  // namespace cardan_native

// Linears: activations times a packed weight, transposed.
#pragma once

#include <memory>

#include "core/tensor.h"
#include "ops/packed.h"

namespace cardan_native {

using Weight = std::shared_ptr<const PackedLinear>;

// x @ weight.T + bias (+ residual), summed in float32 and rounded once; x: [..., columns]; the result, and residual
// where not null, are [..., rows] of type `out`.
//
// Where the weight asks for it, x is rounded to steps of the largest magnitude of each 32 consecutive elements: 127 of
// them for int8, 32,639 for int16 (two planes of int8). An element moves by at most half a step, a result by at most
// the sum of |weight| times that. A row that holds NaN or infinity then becomes NaN everywhere; no other row changes.
//
// Results do not depend on the number of threads, nor on what other rows hold or how many there are; but bfloat16
// times bfloat16 on processors with tiles does depend on their number.
Tensor linear(const char* op, const Tensor& x, const Weight& weight, const Tensor* residual, DType out);

// Which kernel that takes for so many rows of the weight's type of activations: "registers", "cache" or "many", see
// linear_choice.h.
const char* kernel_of(const Weight& weight, int64_t rows);

// Rows `ids` of the weight, rounded to the type of its activations: [ids, columns].
Tensor gather_weight_rows(const Weight& weight, const Tensor& ids);

}  // namespace cardan_native

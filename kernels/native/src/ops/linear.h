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
// Where the weight asks for int8 activations, x is rounded to 127 steps of the largest magnitude of each 32 consecutive
// elements: an element moves by at most 1/254 of that, and a result by at most the sum of |weight| times that. A row
// that holds NaN or infinity then becomes NaN everywhere; no other row changes.
//
// Results do not depend on the number of threads, nor on what other rows hold. With int8 activations they do not depend
// on the number of rows either; see kFewRows and the files of the kernels for the others.
Tensor linear(const char* op, const Tensor& x, const Weight& weight, const Tensor* residual, DType out);

// Rows `ids` of the weight, rounded to the type of its activations: [ids, columns].
Tensor gather_weight_rows(const Weight& weight, const Tensor& ids);

}  // namespace cardan_native

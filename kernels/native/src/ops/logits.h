// Reductions over rows as wide as a vocabulary. All floats are float32; pieces of one row are shared out over threads.
#pragma once

#include <utility>

#include "core/tensor.h"

namespace cardan_native {

// log(sum(exp(x))) of each row: [rows]. A row of -inf gives -inf; a NaN gives NaN.
Tensor logsumexp(const Tensor& x);

// x - logsumexp(x)
Tensor log_softmax(const Tensor& x);

// Index of the first largest entry of each row: int32 [rows]. A NaN is never the largest; a row of them gives 0.
Tensor argmax(const Tensor& x);

// Running sums over the last axis, kept in float64 and rounded one by one.
Tensor cumsum(const Tensor& x);

// The k largest of each row, largest first, equal values by lower index first: float32 and int32 [rows, k]. NaN come
// last.
std::pair<Tensor, Tensor> topk(const Tensor& x, int64_t k);

}  // namespace cardan_native

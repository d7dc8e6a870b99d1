// Norms over the last axis, computed in float32.
#pragma once

#include <utility>

#include "core/tensor.h"

namespace cardan_native {

// x / sqrt(mean(x^2) + eps) * weight; weight is float32 [width].
Tensor rms_norm(const Tensor& x, const Tensor& weight, float eps);

// s = x + residual, rounded to the type of x; returns the norm of s, and s.
std::pair<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, float eps);

// (x - mean) / sqrt(var + eps) * weight + bias; weight is float32 [width], and so is bias, unless it is null.
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor* bias, float eps);

}  // namespace cardan_native

// Sums, products, activations and casts, each element by itself; computed in float32 and rounded once.
#pragma once

#include <string>

#include "core/tensor.h"

namespace cardan_native {

// a + b and a * b in the type that both have; b may lack leading axes of a.
Tensor add(const Tensor& a, const Tensor& b);
Tensor mul(const Tensor& a, const Tensor& b);

Tensor scale(const Tensor& x, float factor);

// x * sigmoid(x)
Tensor silu(const Tensor& x);
// x * P(a normal variable is at most x), or its approximation by tanh.
// Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", section 2.
Tensor gelu(const Tensor& x, bool approximate);
// cap * tanh(x / cap)
Tensor tanh_softcap(const Tensor& x, float cap);

// silu(gate) * up, gelu(gate) * up, for gate_up [..., 2 * size], the gates first.
Tensor silu_mul(const Tensor& gate_up, int64_t size);
Tensor gelu_mul(const Tensor& gate_up, int64_t size, bool approximate);

// e to the x, of float32.
Tensor exponential(const Tensor& x);

// To another type: among floats rounded to nearest even, from int32 and bool to float32, from float32 to int32 (cut
// off). The same type gives the tensor itself.
Tensor cast(const Tensor& x, DType dtype);

}  // namespace cardan_native

// Rotary position embedding.
#pragma once

#include "core/tensor.h"

namespace cardan_native {

// Rotates the first 2 * cos.width features of each head of x [tokens, heads, dim] by `positions: int32 [tokens]`;
// cos and sin are float32 [context, rotary / 2]. Pairs are neighbours when interleaved, else half of the rotary
// features apart. Computed in float32. Throws std::out_of_range for a position that the tables lack.
// Source: Su et al., "RoFormer", equation 34.
Tensor rope(const Tensor& x, const Tensor& positions, const Tensor& cos, const Tensor& sin, bool interleaved);

}  // namespace cardan_native

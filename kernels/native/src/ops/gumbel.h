// Gumbel noise from counters: the same for a seed, a position and a token, whatever the batch around them.
#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace cardan_native {

// Noise float32 [rows, k] of tokens `ids: int32 [rows, k]`; seeds: int32 [rows, 2], their low halves first; positions:
// int32 [rows]. A replay reads all three as they are by then.
//
// Philox4x32-10 under key (low, high half of the seed) and counter (id >> 2, position, 0, 0); word id & 3 of the block
// becomes u = (word + 0.5) / 2^32 and the noise is -log(-log(u)), in float64 and rounded once.
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
Tensor gumbel(const Tensor& seeds, const Tensor& positions, const Tensor& ids);

// The same for all ids below `width`, in order; a block of four words serves four ids.
Tensor gumbel_all(const Tensor& seeds, const Tensor& positions, int64_t width);

}  // namespace cardan_native

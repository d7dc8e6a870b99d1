// Packed weights widened again: scales to float32, codes to bytes or float32, whole weights to float32.
//
// Whole weights come out as `cardan.quantization.dequantize` gives them, bit for bit: one product and one sum in
// float32, both rounded (this file is compiled without contraction), in formats whose products of code and scale are
// exact anyway (all but float32 scales) as well as in the others.
#pragma once

#include "ops/packed.h"

namespace cardan_native {

// Scales (and minimums, where the format has them) of `count` units from `first` on: float32 [count][16].
void expand_scales(const PackedLinear& packed, int64_t panel, int64_t first, int64_t count, float* scales,
                   float* minimums);

// Codes of `count` groups from `first` on, as kByte has them: [count][8][16][4].
void expand_codes(const PackedLinear& packed, int64_t panel, int64_t first, int64_t count, uint8_t* codes);

// Codes less the offset, in the order of inner elements: float32 [32 * count][16].
void expand_float_codes(const PackedLinear& packed, int64_t panel, int64_t first, int64_t count, float* codes);

// Weights of a dense format, of `count` inner elements from `first` on, an even number: float32 [count][16].
void expand_dense(const PackedLinear& packed, int64_t panel, int64_t first, int64_t count, float* weights);

// Weights of one output row: float32 [columns].
void expand_row(const PackedLinear& packed, int64_t row, float* weights);

}  // namespace cardan_native

// Which of its kernels a linear takes for a number of rows of activations: up to `few` rows one that takes codes apart
// in registers, anew for each few rows; beyond one that widens codes into the first-level cache, once for all rows; and
// from `many` on another one, where the processor has better instructions for many.
//
// What is best depends on the processor, so whoever packs a weight may say; here are the bounds of that, and what holds
// where nobody says.
#pragma once

#include <map>
#include <string>

#include "ops/packed.h"

namespace cardan_native {

// Bounds of a crossover, both included, and what it is where nobody says; least == most where there is no choice.
struct CrossoverRange {
  int64_t least = 0, most = 0, usual = 0;
};

// What kernels are chosen by, beside rows: codes, and what activations are rounded to. Such as "nibble-int16".
std::string kind_of(const PackedLinear& weight);

CrossoverRange few_range(const PackedLinear& weight);
CrossoverRange many_range(const PackedLinear& weight);

// The crossovers of a weight: those in `given` under "KIND.few" and "KIND.many" where there is a choice, else the usual
// ones. Throws std::invalid_argument where one is out of its bounds.
Crossovers crossovers_of(const PackedLinear& weight, const std::map<std::string, int64_t>& given);

// Whether the kernel for few rows is taken, where the one for many is not; and whether that is, where there is one.
inline bool takes_few(const PackedLinear& weight, int64_t rows) { return rows <= weight.crossovers.few; }
inline bool takes_many(const PackedLinear& weight, int64_t rows) { return rows >= weight.crossovers.many; }

}  // namespace cardan_native

// Loops over the values of a row, in vectors to its very end.
//
// The last values go through the same vector code as all others, so that a value never depends on where it stands.
#pragma once

#include "simd/vec.h"

namespace cardan_native {

// out[i] = function(x[i])
template <class From, class To, class Function>
inline void map(const From* x, To* out, int64_t width, Function&& function) {
  int64_t column = 0;
  for (; column + kLanes <= width; column += kLanes) store(out + column, function(load(x + column)));
  if (const int rest = static_cast<int>(width - column))
    store_part(out + column, function(load_part(x + column, rest)), rest);
}

// out[i] = function(a[i], b[i])
template <class A, class B, class To, class Function>
inline void zip(const A* a, const B* b, To* out, int64_t width, Function&& function) {
  int64_t column = 0;
  for (; column + kLanes <= width; column += kLanes)
    store(out + column, function(load(a + column), load(b + column)));
  if (const int rest = static_cast<int>(width - column))
    store_part(out + column, function(load_part(a + column, rest), load_part(b + column, rest)), rest);
}

// The sum of function(x[i]), in float32.
template <class From, class Function>
inline float sum_of(const From* x, int64_t width, Function&& function) {
  vf sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  int64_t column = 0;
  for (; column + 4 * kLanes <= width; column += 4 * kLanes)
    for (int part = 0; part < 4; ++part) sums[part] += function(load(x + column + part * kLanes));
  for (; column + kLanes <= width; column += kLanes) sums[0] += function(load(x + column));
  float total = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if (const int rest = static_cast<int>(width - column)) {
    const vf last = function(load_part(x + column, rest));
    for (int lane = 0; lane < rest; ++lane) total += last[lane];
  }
  return total;
}

}  // namespace cardan_native

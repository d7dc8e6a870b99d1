// Functions of vectors of floats. Bounds on errors are in units of the last place of a float32, and tested.
//
// The polynomials' coefficients come from fit_functions.py.
#pragma once

#include "simd/vec.h"

namespace cardan_native {

// a[0] + a[1] x + a[2] x^2 + ...
template <int kTerms>
inline vf polynomial(vf x, const float (&a)[kTerms]) {
  vf out = splat(a[kTerms - 1]);
  for (int term = kTerms - 2; term >= 0; --term) out = fused(out, x, splat(a[term]));
  return out;
}

inline constexpr float kLowestExponent = -87.3365f, kHighestExponent = 88.7228f;  // whose e^x is a normal number

// e to the x within 2 ulp, for x from the lowest to the highest exponent.
// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r = 1 + r + r^2 times a polynomial; n is added to the exponent of that.
inline vf exp_normal(vf x) {
  const vf shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded integer
  const vf n = shifted - 12582912.0f;
  vf r = n * -0.693359375f + x;  // ln 2 in two parts, the first with so few bits that its product is exact
  r = n * 2.12194440e-4f + r;
  constexpr float kRest[] = {0.5f, 0.166665733f, 0.0416668616f, 0.00836374052f, 0.00139015343f};
  const vf p = fused(r * r, polynomial(r, kRest), r) + 1.0f;
  return (vf)((vu)p + ((vu)shifted << 23));
}

// The same for x of at most 0: 0 below -87.33, NaN for NaN.
inline vf exp_below_0(vf x) {
  const vf result = exp_normal(larger(x, splat(kLowestExponent)));
  return pick(x != x, x, pick(x < splat(kLowestExponent), splat(0.0f), result));
}

// The same for every x: 0 below -87.33, infinity above 88.72, NaN for NaN.
inline vf exp(vf x) {
  vf out = exp_normal(larger(smaller(x, splat(kHighestExponent)), splat(kLowestExponent)));
  out = pick(x < splat(kLowestExponent), splat(0.0f), out);
  out = pick(x > splat(kHighestExponent), splat(INFINITY), out);
  return pick(x != x, x, out);
}

// 1 / (1 + e^-x) within 4 ulp; 0 below -88.72.
inline vf sigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

// 1 - 2 / (e^(2x) + 1), and an odd polynomial near 0, where that would cancel; within 4 ulp.
inline vf tanh(vf x) {
  const vf big = splat(1.0f) - splat(2.0f) / (exp(x + x) + 1.0f);
  const vf square = x * x;
  constexpr float kOdd[] = {-0.333333284f, 0.133327678f, -0.0538506545f, 0.0209959336f, -0.00609486923f};
  const vf small = x * fused(square, polynomial(square, kOdd), splat(1.0f));
  return pick(square < splat(0.390625f), small, big);
}

// The probability that a normal variable is at most x, (1 + erf(x / sqrt(2))) / 2, within 2e-7; where it is small,
// also within 8 + x^2 / 2 ulp, since x^2 is rounded before e is raised to it.
inline vf normal_cdf(vf x) {
  const vf square = x * x, size = larger(x, -x);
  constexpr float kCentre[] = {0.398942292f,    -0.0664903596f,  0.00997332297f,
                               -0.00118632999f, 0.000113486378f, -7.65420918e-06f};
  const vf centre = fused(x, polynomial(square, kCentre), splat(0.5f));
  const vf t = splat(1.0f) / (size * 0.5f + 1.0f);
  constexpr float kTail[] = {0.199470416f,   0.199448571f,   0.150517046f, 0.0387385488f,
                             0.00545072509f, -0.340606332f, 0.373604953f, -0.127559811f};
  const vf tail = exp(square * -0.5f) * t * polynomial(t, kTail);
  const vf outside = pick(x < splat(0.0f), tail, splat(1.0f) - tail);
  return pick(square < splat(1.0f), centre, outside);
}

}  // namespace cardan_native

// What attention needs across the lanes of vectors: sums of several at once, transposition, softmax of a row.
#pragma once

#include <cstddef>
#include <utility>

#include "simd/functions.h"

namespace cardan_native {

// An array of vectors; std::array would lose the attribute that makes `vf` a vector.
template <int Count>
struct Vectors {
  vf at[Count];
};

namespace lanes {

using All = std::make_index_sequence<kLanes>;

// Lanes without the bit `Step` from a, those with it from b, Step lanes below.
template <int Step, size_t... Lane>
vf lower(vf a, vf b, std::index_sequence<Lane...>) {
  return __builtin_shufflevector(a, b, static_cast<int>(Lane & Step ? kLanes + Lane - Step : Lane)...);
}

// Lanes without the bit `Step` from a, Step lanes above, those with it from b.
template <int Step, size_t... Lane>
vf upper(vf a, vf b, std::index_sequence<Lane...>) {
  return __builtin_shufflevector(a, b, static_cast<int>(Lane & Step ? kLanes + Lane : Lane + Step)...);
}

template <int Step, size_t... Lane>
vf swapped(vf a, std::index_sequence<Lane...>) {
  return __builtin_shufflevector(a, a, static_cast<int>(Lane ^ Step)...);
}

}  // namespace lanes

// Lane i, modulo Count, becomes the sum of all lanes of vector i. Every sum is the same tree, whatever Count is.
template <int Count, int Step = 1>
inline vf sums_of(const Vectors<Count>& x) {
  if constexpr (Step == kLanes) {
    return x.at[0];
  } else if constexpr (Count == 1) {
    return sums_of<1, Step * 2>({x.at[0] + lanes::swapped<Step>(x.at[0], lanes::All())});
  } else {
    Vectors<Count / 2> half;
    for (int i = 0; i < Count / 2; ++i)
      half.at[i] = lanes::lower<Step>(x.at[2 * i], x.at[2 * i + 1], lanes::All()) +
                   lanes::upper<Step>(x.at[2 * i], x.at[2 * i + 1], lanes::All());
    return sums_of<Count / 2, Step * 2>(half);
  }
}

inline float total(vf x) { return sums_of<1>({x})[0]; }

template <int Step = 1>
inline float largest_of(vf x) {
  if constexpr (Step == kLanes)
    return x[0];
  else
    return largest_of<Step * 2>(larger(x, lanes::swapped<Step>(x, lanes::All())));
}

// Rows become columns.
template <int Step = 1>
inline void transpose(vf* x) {
  if constexpr (Step < kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      if (i & Step) continue;
      const vf a = x[i], b = x[i + Step];
      x[i] = lanes::lower<Step>(a, b, lanes::All());
      x[i + Step] = lanes::upper<Step>(a, b, lanes::All());
    }
    transpose<Step * 2>(x);
  }
}

// Asks for keys or values of a block before they are needed, a few with each call, so that the requests of one do not
// hold up the computation of another. Rows of a block lie anywhere, where the processor does not look ahead by itself.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const char* base, int64_t stride, int64_t bytes, const int32_t* slots, int64_t count)
      : base_(base), stride_(stride), bytes_(bytes), slots_(slots), behind_(slots + count) {}

  void next(int64_t rows) {
    for (; rows > 0 && slots_ != behind_; --rows) {
      const char* row = base_ + *slots_++ * stride_;
      for (int64_t byte = 0; byte < bytes_; byte += 64) __builtin_prefetch(row + byte);
    }
  }

 private:
  const char* base_ = nullptr;
  int64_t stride_ = 0, bytes_ = 0;  // from row to row, and of a row
  const int32_t *slots_ = nullptr, *behind_ = nullptr;
};

inline int64_t whole_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Prepares the scores of one query for exponentiation: caps them, and hides all but [first, last). `count` is a
// multiple of kLanes. Returns the largest; a NaN may or may not show in it, but stays among the scores.
inline float prepare_scores(float* scores, int64_t count, int64_t first, int64_t last, float softcap) {
  if (softcap > 0.0f) {
    const vf cap = splat(softcap), inverse = splat(1.0f / softcap);
    for (int64_t key = 0; key < count; key += kLanes) store(scores + key, cap * tanh(load(scores + key) * inverse));
  }
  for (int64_t key = 0; key < first; ++key) scores[key] = -INFINITY;
  for (int64_t key = last; key < count; ++key) scores[key] = -INFINITY;
  vf most = splat(-INFINITY);
  for (int64_t key = 0; key < count; key += kLanes) most = larger(load(scores + key), most);
  return largest_of(most);
}

// exp(score - largest) in place of each score; returns their sum. Where all are hidden, all are 0.
inline float exponentiate(float* scores, int64_t count, float largest) {
  const vf offset = splat(largest == -INFINITY ? 0.0f : largest);
  vf sum = splat(0.0f);
  for (int64_t key = 0; key < count; key += kLanes) {
    const vf weight = exp_below_0(load(scores + key) - offset);
    store(scores + key, weight);
    sum = sum + weight;
  }
  return total(sum);
}

}  // namespace cardan_native

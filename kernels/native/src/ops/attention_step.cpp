#include "ops/attention_step.h"

#include <cstring>

#include "simd/functions.h"

namespace cardan_native {

void read_query(const AttentionStep& step, int64_t token, int64_t head, float* to, int64_t width) {
  with_float(step.dtype, "attention", [&]<class T>(T) {
    const T* from = reinterpret_cast<const T*>(step.q) + token * step.q_token_stride + head * step.q_head_stride;
    int64_t column = 0;
    for (; column + kLanes <= step.k_dim; column += kLanes) store(to + column, load(from + column) * step.scale);
    for (; column < step.k_dim; ++column) to[column] = widen(from[column]) * step.scale;
    for (; column < width; ++column) to[column] = 0.0f;
  });
}

// A sink takes its share of the sum and brings no value.
void write_result(const AttentionStep& step, int64_t token, int64_t head, const AttentionState& state) {
  float sum = state.sum, factor = 1.0f;
  if (step.sinks) {
    const float sink = step.sinks[head], largest = state.largest > sink ? state.largest : sink;
    factor = exp(splat(state.largest - largest))[0];
    sum = sum * factor + exp(splat(sink - largest))[0];
  }
  factor = sum == 0.0f ? 0.0f : factor / sum * step.value_scale;
  with_float(step.dtype, "attention", [&]<class T>(T) {
    T* to = reinterpret_cast<T*>(step.out) + (token * step.q_heads + head) * step.v_dim;
    int64_t column = 0;
    for (; column + kLanes <= step.v_dim; column += kLanes) store(to + column, load(state.values + column) * factor);
    for (; column < step.v_dim; ++column) narrow(state.values[column] * factor, to + column);
  });
}

void write_zeros(const AttentionStep& step, int64_t first, int64_t count) {
  const int64_t bytes = step.q_heads * step.v_dim * static_cast<int64_t>(size_of(step.dtype));
  if (count > 0) std::memset(step.out + first * bytes, 0, static_cast<size_t>(count * bytes));
}

}  // namespace cardan_native

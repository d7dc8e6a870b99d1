// What one call of attention works on, as the plain pointers that a recorded kernel may hold.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

#include "core/types.h"
#include "simd/bytes.h"

namespace cardan_native {

// Calls body with a value of the C++ type that keys and values are kept in.
template <class Body>
decltype(auto) with_stored(DType dtype, const char* op, Body&& body) {
  switch (dtype) {
    case DType::kI8:
      return body(i8{});
    case DType::kE4M3:
      return body(e4m3{});
    case DType::kE5M2:
      return body(e5m2{});
    default:
      return with_float(dtype, op, std::forward<Body>(body));
  }
}

// Whether keys and values of a type go with a scale for each slot and head.
template <class T>
inline constexpr bool kScaled = std::is_same_v<T, i8>;

struct AttentionStep {
  const char* q = nullptr;  // [tokens, q_heads, k_dim]
  char* out = nullptr;      // [tokens, q_heads * v_dim]
  DType dtype = DType::kF32;
  int64_t tokens = 0, q_token_stride = 0, q_head_stride = 0;

  const char* keys = nullptr;    // [slots, kv_heads, k_dim]
  const char* values = nullptr;  // [slots, kv_heads, v_dim]
  DType kv_dtype = DType::kF32;
  const float *key_scales = nullptr, *value_scales = nullptr;  // [slots, kv_heads], of int8

  const int32_t* table = nullptr;  // [table_rows, max_length]
  int64_t table_rows = 0, max_length = 0;
  const int32_t *row_ids = nullptr, *query_starts = nullptr, *seq_lens = nullptr;
  int64_t rows = 0;

  int64_t q_heads = 0, kv_heads = 0, k_dim = 0, v_dim = 0;
  int64_t shared = 1;  // query heads to a key head
  float scale = 1.0f, softcap = 0.0f;
  float value_scale = 1.0f;
  int64_t window = 0;
  const float* sinks = nullptr;

  // Of a head, where there are any.
  static const float* scales_of(const float* scales, int64_t kv_head) { return scales ? scales + kv_head : nullptr; }
  int64_t key_stride() const { return kv_heads * k_dim; }
  int64_t value_stride() const { return kv_heads * v_dim; }
  // The first key that a query at `position` sees.
  int64_t first_key(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
};

// One sequence of a step.
struct AttentionRow {
  const int32_t* slots = nullptr;  // of its positions
  int64_t first_token = 0;         // in the batch
  int64_t count = 0;               // tokens that attend
  int64_t length = 0;              // keys, theirs included

  int64_t position(int64_t token) const { return length - count + token; }
};

// Memory that grows and stays; one per thread, so that kernels allocate on their first runs only.
class AttentionScratch {
 public:
  AttentionScratch() = default;
  AttentionScratch(const AttentionScratch&) = delete;
  AttentionScratch& operator=(const AttentionScratch&) = delete;
  ~AttentionScratch() { std::free(data_); }

  // At least `floats`, aligned to 64 bytes; what an earlier call gave is gone.
  float* need(int64_t floats) {
    if (floats <= size_) return data_;
    std::free(data_);
    size_ = padded(floats + floats / 4);
    data_ = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(size_) * sizeof(float)));
    if (!data_) throw std::bad_alloc();
    return data_;
  }

  static int64_t padded(int64_t floats) { return (floats + 15) / 16 * 16; }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

// Query `head` of batch token `token`, times the scale, with zeros up to `width`.
void read_query(const AttentionStep& step, int64_t token, int64_t head, float* to, int64_t width);

// What is known of one query after some of its keys: the largest score, the sum of exp(score - largest), and the
// values weighed by those.
struct AttentionState {
  float largest, sum;
  const float* values;
};

// Ends the softmax of a query and writes its result; `head` says which sink joins in.
void write_result(const AttentionStep& step, int64_t token, int64_t head, const AttentionState& state);

// Zeros for `count` tokens from `first`.
void write_zeros(const AttentionStep& step, int64_t first, int64_t count);

}  // namespace cardan_native

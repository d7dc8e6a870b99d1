// Writing keys and values to their slots, and slots to the tables.

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/dispatch.h"
#include "ops/attention.h"
#include "ops/attention_step.h"
#include "simd/loops.h"

namespace cardan_native {
namespace {

constexpr int64_t kElementsPerPiece = 1 << 14;

// Where scales would not be normal numbers any more, all codes are 0.
constexpr float kLeastCoded = 0x1p-100f;

// What goes from rows of one tensor to the slots of another.
struct Move {
  const char* from;
  char* to;
  float* scales;  // of each slot and head, or null
  float factor;
  int64_t from_stride, heads, dim, num_slots;

  int64_t width() const { return heads * dim; }
};

template <class From, class To>
void copy_row(const From* from, To* to, int64_t width, float factor) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, static_cast<size_t>(width) * sizeof(To));
  } else {
    map(from, to, width, [factor](vf x) { return x * factor; });
  }
}

// Codes of one head; returns their scale.
template <class From>
float code_row(const From* from, i8* to, int64_t width) {
  vf most = splat(0.0f);
  const auto size = [](vf x) { return larger(x, -x); };
  int64_t column = 0;
  for (; column + kLanes <= width; column += kLanes) most = larger(size(load(from + column)), most);  // passes over NaN
  if (column < width) most = larger(size(load_part(from + column, static_cast<int>(width - column))), most);
  const float largest = std::min(max_lanes(most), std::numeric_limits<float>::max());
  if (largest < kLeastCoded) {
    std::memset(to, 0, static_cast<size_t>(width));
    return 0.0f;
  }
  const float factor = kLargest<i8> / largest;
  map(from, to, width, [factor](vf x) { return x * factor; });
  return largest / kLargest<i8>;
}

template <class From, class To>
void move_rows(const Move& move, const int32_t* slots, int64_t first, int64_t last) {
  for (int64_t token = first; token < last; ++token) {
    const int64_t slot = slots[token];
    if (slot < 0 || slot >= move.num_slots) continue;
    const From* from = reinterpret_cast<const From*>(move.from) + token * move.from_stride;
    To* to = reinterpret_cast<To*>(move.to) + slot * move.width();
    if constexpr (kScaled<To>) {
      for (int64_t head = 0; head < move.heads; ++head)
        move.scales[slot * move.heads + head] = code_row(from + head * move.dim, to + head * move.dim, move.dim);
    } else {
      copy_row(from, to, move.width(), move.factor);
    }
  }
}

Move move_of(const char* name, const Tensor& x, const Tensor& pool, const Tensor* scales, float scale) {
  const int64_t tokens = x.shape[0];
  expect_rank("write_kv", name, pool, 3);
  expect_shape("write_kv", name, x, {tokens, pool.shape[1], pool.shape[2]});
  if (!pool.contiguous()) refuse("write_kv", name, "contiguous", pool);
  if (x.shape[1] > 1 && x.strides[1] != x.shape[2]) refuse("write_kv", name, "of heads side by side", x);
  return {x.data,       pool.data,     scales ? scales->ptr<float>() : nullptr, 1.0f / scale,
          x.strides[0], pool.shape[1], pool.shape[2],                           pool.shape[0]};
}

}  // namespace

void write_kv(const Tensor& k, const Tensor& v, const LayerPool& pool, const Tensor& out_slots, int64_t group) {
  expect_rank("write_kv", "k", k, 3);
  expect_dtype("write_kv", "v", v, k.dtype);
  expect_dtype("write_kv", "values", pool.values, pool.keys.dtype);
  check_scales("write_kv", pool);
  expect_dtype("write_kv", "out_slots", out_slots, DType::kI32);
  expect_rank("write_kv", "out_slots", out_slots, 2);
  expect_shape("write_kv", "out_slots", out_slots, {out_slots.shape[0], k.shape[0]});
  if (group < 0 || group >= out_slots.shape[0])
    throw std::invalid_argument("write_kv: group must be below " + std::to_string(out_slots.shape[0]) + ", got " +
                                std::to_string(group));
  const int64_t tokens = k.shape[0];
  expect_shape("write_kv", "v", v, {tokens, v.shape[1], v.shape[2]});
  const Move first = move_of("k", k, pool.keys, pool.key_scales, pool.key_scale);
  const Move second = move_of("v", v, pool.values, pool.value_scales, pool.value_scale);
  const int32_t* slots = out_slots.ptr<int32_t>() + group * out_slots.strides[0];
  with_float(k.dtype, "write_kv", [&]<class From>(From) {
    with_stored(pool.keys.dtype, "write_kv", [&]<class To>(To) {
      dispatch({&k, &v, &pool.keys, &pool.values, pool.key_scales, pool.value_scales, &out_slots},
               [first, second, slots, tokens](Pool& threads) {
        const int64_t grain = kElementsPerPiece / std::max<int64_t>(1, first.width() + second.width()) + 1;
        threads.parallel(tokens, grain, [&](int64_t start, int64_t stop) {
          move_rows<From, To>(first, slots, start, stop);
          move_rows<From, To>(second, slots, start, stop);
        });
      });
    });
  });
}

void write_table(const Tensor& table, const TableChanges& changes, int64_t num_slots) {
  expect_dtype("write_table", "table", table, DType::kI32);
  expect_rank("write_table", "table", table, 3);
  if (!table.contiguous()) refuse("write_table", "table", "contiguous", table);
  const int64_t groups = table.shape[0], rows = table.shape[1], length = table.shape[2];
  const auto check = [](const char* what, const int32_t* values, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
      if (values[i] < 0 || values[i] >= limit)
        throw std::invalid_argument(std::string("write_table: ") + what + " must be from 0 to " +
                                    std::to_string(limit - 1) + ", got " + std::to_string(values[i]));
  };
  check("rows", changes.rows, changes.count, rows);
  check("positions", changes.positions, changes.count, length);
  check("slots", changes.slots, changes.count * groups, num_slots);
  for (int64_t group = 0; group < groups; ++group) {
    int32_t* to = table.ptr<int32_t>() + group * rows * length;
    const int32_t* slots = changes.slots + group * changes.count;
    for (int64_t i = 0; i < changes.count; ++i) to[changes.rows[i] * length + changes.positions[i]] = slots[i];
  }
}

}  // namespace cardan_native

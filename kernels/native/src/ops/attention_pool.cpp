// Writing keys and values to their slots, and slots to the tables.

#include <cstring>
#include <type_traits>

#include "core/dispatch.h"
#include "ops/attention.h"
#include "simd/vec.h"

namespace cardan_native {
namespace {

constexpr int64_t kElementsPerPiece = 1 << 14;

// What goes from rows of one tensor to the slots of another.
struct Move {
  const char* from;
  char* to;
  int64_t from_stride, width, num_slots;
};

template <class From, class To>
void copy_row(const From* from, To* to, int64_t width) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, static_cast<size_t>(width) * sizeof(To));
  } else {
    int64_t column = 0;
    for (; column + kLanes <= width; column += kLanes) store(to + column, load(from + column));
    for (; column < width; ++column) narrow(widen(from[column]), to + column);
  }
}

template <class From, class To>
void move_rows(const Move& move, const int32_t* slots, int64_t first, int64_t last) {
  for (int64_t token = first; token < last; ++token) {
    const int64_t slot = slots[token];
    if (slot < 0 || slot >= move.num_slots) continue;
    copy_row(reinterpret_cast<const From*>(move.from) + token * move.from_stride,
             reinterpret_cast<To*>(move.to) + slot * move.width, move.width);
  }
}

Move move_of(const char* name, const Tensor& x, const Tensor& pool, int64_t tokens) {
  expect_rank("write_kv", name, pool, 3);
  expect_shape("write_kv", name, x, {tokens, pool.shape[1], pool.shape[2]});
  if (!pool.contiguous()) refuse("write_kv", name, "contiguous", pool);
  if (x.shape[1] > 1 && x.strides[1] != x.shape[2]) refuse("write_kv", name, "of heads side by side", x);
  return {x.data, pool.data, x.strides[0], pool.shape[1] * pool.shape[2], pool.shape[0]};
}

}  // namespace

void write_kv(const Tensor& k, const Tensor& v, const Tensor& keys, const Tensor& values, const Tensor& out_slots,
              int64_t group) {
  expect_rank("write_kv", "k", k, 3);
  expect_dtype("write_kv", "v", v, k.dtype);
  expect_dtype("write_kv", "values", values, keys.dtype);
  expect_dtype("write_kv", "out_slots", out_slots, DType::kI32);
  expect_rank("write_kv", "out_slots", out_slots, 2);
  expect_shape("write_kv", "out_slots", out_slots, {out_slots.shape[0], k.shape[0]});
  if (group < 0 || group >= out_slots.shape[0])
    throw std::invalid_argument("write_kv: group must be below " + std::to_string(out_slots.shape[0]) + ", got " +
                                std::to_string(group));
  const int64_t tokens = k.shape[0];
  const Move first = move_of("k", k, keys, tokens), second = move_of("v", v, values, tokens);
  const int32_t* slots = out_slots.ptr<int32_t>() + group * out_slots.strides[0];
  with_float(k.dtype, "write_kv", [&]<class From>(From) {
    with_float(keys.dtype, "write_kv", [&]<class To>(To) {
      dispatch({&k, &v, &keys, &values, &out_slots}, [first, second, slots, tokens](Pool& pool) {
        const int64_t grain = kElementsPerPiece / std::max<int64_t>(1, first.width + second.width) + 1;
        pool.parallel(tokens, grain, [&](int64_t start, int64_t stop) {
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

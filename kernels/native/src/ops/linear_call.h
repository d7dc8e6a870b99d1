// What a kernel of a linear is given, and what all of them share: activations made ready, and results written out.
#pragma once

#include "core/threads.h"
#include "ops/packed.h"

namespace cardan_native {

// Plain pointers only: a call is recorded and run again.
struct LinearCall {
  const PackedLinear* weight = nullptr;
  Rows x, residual, out;  // residual.data is null where there is none
  char* scratch = nullptr;
};

// One float32 row after the other; `stride` elements apart.
struct FloatRows {
  const float* data = nullptr;
  int64_t stride = 0;
};

// Rows quantized by groups of 32: value = scale * code; code = 256 * that of the second plane + that of the first.
// `sums` has one entry for each unit of the weight: scale times the sum of the unit's codes where the weight has
// minimums, as float32; else that sum times -offset, as int32.
struct Int8Rows {
  const int8_t* codes = nullptr;
  const float* scales = nullptr;
  const void* sums = nullptr;
  int64_t code_stride = 0, plane_stride = 0, scale_stride = 0, sum_stride = 0;
};

// The rows from one on.
inline Int8Rows rows_from(const Int8Rows& x, int64_t row) {
  Int8Rows out = x;
  out.codes += row * x.code_stride;
  out.scales += row * x.scale_stride;
  out.sums = static_cast<const char*>(x.sums) + row * x.sum_stride * 4;
  return out;
}

// Rows of activations that one piece of work covers, and the panels of one output of a call in pieces.
inline constexpr int64_t kRowBlock = 128;

// Bytes of scratch that each kind of rows needs.
int64_t float_rows_bytes(const Rows& x);
int64_t int8_rows_bytes(const PackedLinear& weight, int64_t rows);
int64_t bf16_rows_bytes(const Rows& x);
int64_t float_bytes(const PackedLinear& weight, const Rows& x);

// The rows of x as float32: x itself where it is that, else widened into scratch.
FloatRows widen_rows_of(const LinearCall& call, Pool& pool);
Int8Rows quantize_rows_of(const LinearCall& call, Pool& pool);

// Writes `rows` rows of some panels, from row `first` on: adds bias and residual, rounds once. Sums are [rows][16] for
// each panel, `stride` floats apart.
void finish(const LinearCall& call, int64_t panel, int64_t panels, int64_t first, int64_t rows, const float* sums,
            int64_t stride = 0);

inline constexpr int64_t kSerialElements = 1 << 15;  // fewer are converted sooner than threads wake

// body(row) for all rows of x.
template <class Body>
void for_each_row(int64_t rows, int64_t width, Pool& pool, const Body& body) {
  if (rows * width <= kSerialElements) {
    for (int64_t row = 0; row < rows; ++row) body(row);
    return;
  }
  pool.parallel(rows, pool.even_grain(rows), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) body(row);
  });
}

// body(panel, first_row, last_row) for all panels and blocks of rows.
template <class Body>
void for_each_block(const LinearCall& call, Pool& pool, const Body& body) {
  const int64_t panels = call.weight->panels(), blocks = (call.x.rows + kRowBlock - 1) / kRowBlock;
  const int64_t tasks = panels * blocks;
  pool.parallel(tasks, pool.even_grain(tasks, 8), [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t row = task / panels * kRowBlock;
      body(task % panels, row, std::min(row + kRowBlock, call.x.rows));
    }
  });
}

// --- kernels ---

void linear_int8(const LinearCall& call, Pool& pool);
void linear_float(const LinearCall& call, Pool& pool);

// Many quantized rows, where pairs of int16 are the best that the processor multiplies.
bool has_int16_pairs(const PackedLinear& weight);
int64_t int16_rows_bytes(const PackedLinear& weight, int64_t rows);
void linear_int16_pairs(const LinearCall& call, Pool& pool);

// bfloat16 activations and weights, where the processor multiplies pairs of them.
bool takes_bf16_pairs(const PackedLinear& weight, DType x);
bool has_bf16_tiles(const PackedLinear& weight);  // for many rows
void linear_bf16_pairs(const LinearCall& call, Pool& pool);

}  // namespace cardan_native

#include "ops/linear.h"

#include "core/dispatch.h"
#include "ops/linear_call.h"
#include "ops/linear_choice.h"
#include "ops/linear_expand.h"
#include "simd/vec.h"

namespace cardan_native {
namespace {

// A recorded kernel points at its weight, so the graph keeps it.
void keep_recorded(const Weight& weight) {
  if (Graph* graph = Graph::recording()) graph->keep(std::const_pointer_cast<PackedLinear>(weight));
}

bool takes_int16_pairs(const PackedLinear& weight, int64_t rows) {
  return has_int16_pairs(weight) && takes_many(weight, rows);
}

int64_t scratch_bytes(const PackedLinear& weight, const Rows& x) {
  if (weight.activations != Activations::kFloat)
    return takes_int16_pairs(weight, x.rows) ? int16_rows_bytes(weight, x.rows) : int8_rows_bytes(weight, x.rows);
  if (takes_bf16_pairs(weight, x.dtype)) return bf16_rows_bytes(x);
  return float_bytes(weight, x);
}

void run(const LinearCall& call, Pool& pool) {
  const bool rounded = call.weight->activations != Activations::kFloat;
  if (rounded && takes_int16_pairs(*call.weight, call.x.rows))
    linear_int16_pairs(call, pool);
  else if (rounded)
    linear_int8(call, pool);
  else if (takes_bf16_pairs(*call.weight, call.x.dtype))
    linear_bf16_pairs(call, pool);
  else
    linear_float(call, pool);
}

}  // namespace

const char* kernel_of(const Weight& weight, int64_t rows) {
  if (takes_int16_pairs(*weight, rows)) return "many";
  if (takes_bf16_pairs(*weight, weight->dtype))
    return has_bf16_tiles(*weight) && takes_many(*weight, rows) ? "many" : "cache";
  return takes_few(*weight, rows) ? "registers" : "cache";
}

Tensor linear(const char* op, const Tensor& x, const Weight& weight, const Tensor* residual, DType out_dtype) {
  if (x.width() != weight->columns)
    refuse(op, "x", "of " + std::to_string(weight->columns) + " columns, as the weight has", x);
  with_float(x.dtype, op, [](auto) {});
  Shape dims = x.dims();
  dims.back() = weight->rows;
  if (residual) {
    expect_dtype(op, "residual", *residual, out_dtype);
    expect_shape(op, "residual", *residual, dims);
  }
  Tensor out = Tensor::empty(dims, out_dtype);
  LinearCall call;
  call.weight = weight.get();
  call.x = Rows(x);
  call.out = Rows(out);
  if (residual) call.residual = Rows(*residual);
  if (call.x.rows == 0 || weight->rows == 0) return out;
  const Tensor scratch = Tensor::empty({std::max<int64_t>(1, scratch_bytes(*weight, call.x))}, DType::kU8);
  call.scratch = scratch.data;
  keep_recorded(weight);
  dispatch({&x, residual, &out, &scratch}, [call](Pool& pool) { run(call, pool); });
  return out;
}

Tensor gather_weight_rows(const Weight& weight, const Tensor& ids) {
  expect_dtype("gather_rows", "ids", ids, DType::kI32);
  expect_rank("gather_rows", "ids", ids, 1);
  Tensor out = Tensor::empty({ids.size(), weight->columns}, weight->dtype);
  const Tensor scratch = Tensor::empty({std::max<int64_t>(1, ids.size() * weight->columns)}, DType::kF32);
  keep_recorded(weight);
  dispatch({&ids, &out, &scratch}, [packed = weight.get(), from = ids.ptr<int32_t>(), to = Rows(out),
                                    rows = Rows(scratch).at<float>(0)](Pool& pool) {
    pool.parallel(to.rows, pool.even_grain(to.rows), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        // An id outside the table has no row; NaN shows it, and nothing outside is read.
        float* row = rows + i * packed->columns;
        if (from[i] >= 0 && from[i] < packed->rows)
          expand_row(*packed, from[i], row);
        else
          std::fill(row, row + packed->columns, NAN);
        with_float(to.dtype, "gather_rows", [&]<class T>(T) {
          for (int64_t column = 0; column < packed->columns; ++column) narrow(row[column], to.at<T>(i) + column);
        });
      }
    });
  });
  return out;
}

}  // namespace cardan_native

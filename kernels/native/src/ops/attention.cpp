#include "ops/attention.h"

#include "core/dispatch.h"
#include "ops/attention_schedule.h"

namespace cardan_native {
namespace {

constexpr int64_t kSerialProducts = 1 << 18;  // below, one thread is done before the others have woken up
constexpr int64_t kSerialMerges = 1 << 15;

void check_rows(const AttentionRows& rows) {
  expect_rank("attention", "table", rows.table, 3);
  expect_rank("attention", "row_ids", rows.row_ids, 1);
  for (const Tensor* tensor : {&rows.table, &rows.row_ids, &rows.query_starts, &rows.seq_lens})
    expect_dtype("attention", "table, row_ids, query_starts and seq_lens", *tensor, DType::kI32);
  expect_shape("attention", "query_starts", rows.query_starts, {rows.row_ids.shape[0] + 1});
  expect_shape("attention", "seq_lens", rows.seq_lens, {rows.row_ids.shape[0]});
  if (!rows.table.contiguous()) refuse("attention", "table", "contiguous", rows.table);
  if (rows.group < 0 || rows.group >= rows.table.shape[0])
    throw std::invalid_argument("attention: group must be below " + std::to_string(rows.table.shape[0]) + ", got " +
                                std::to_string(rows.group));
}

void check_pool(const Tensor& q, const LayerPool& pool) {
  const Tensor &keys = pool.keys, &values = pool.values;
  expect_rank("attention", "q", q, 3);
  expect_rank("attention", "keys", keys, 3);
  expect_shape("attention", "keys", keys, {keys.shape[0], keys.shape[1], q.shape[2]});
  expect_rank("attention", "values", values, 3);
  expect_shape("attention", "values", values, {keys.shape[0], keys.shape[1], values.shape[2]});
  expect_dtype("attention", "values", values, keys.dtype);
  if (!keys.contiguous()) refuse("attention", "keys", "contiguous", keys);
  if (!values.contiguous()) refuse("attention", "values", "contiguous", values);
  if (q.shape[1] % std::max<int64_t>(keys.shape[1], 1))
    refuse("attention", "q", "of a multiple of " + std::to_string(keys.shape[1]) + " heads", q);
  check_scales("attention", pool);
}

AttentionStep step_of(const Tensor& q, const LayerPool& pool, const AttentionRows& rows, const AttentionLayer& layer) {
  const Tensor &keys = pool.keys, &values = pool.values;
  AttentionStep step;
  step.q = q.data;
  step.dtype = q.dtype;
  step.tokens = q.shape[0];
  step.q_token_stride = q.strides[0];
  step.q_head_stride = q.strides[1];
  step.keys = keys.data;
  step.values = values.data;
  step.kv_dtype = keys.dtype;
  if (pool.key_scales) step.key_scales = pool.key_scales->ptr<float>();
  if (pool.value_scales) step.value_scales = pool.value_scales->ptr<float>();
  step.table_rows = rows.table.shape[1];
  step.max_length = rows.table.shape[2];
  step.table = rows.table.ptr<int32_t>() + rows.group * step.table_rows * step.max_length;
  step.row_ids = rows.row_ids.ptr<int32_t>();
  step.query_starts = rows.query_starts.ptr<int32_t>();
  step.seq_lens = rows.seq_lens.ptr<int32_t>();
  step.rows = rows.row_ids.shape[0];
  step.q_heads = q.shape[1];
  step.kv_heads = keys.shape[1];
  step.k_dim = keys.shape[2];
  step.v_dim = values.shape[2];
  step.shared = step.q_heads / step.kv_heads;
  step.scale = layer.scale * pool.key_scale;
  step.value_scale = pool.value_scale;
  step.softcap = layer.softcap;
  step.window = layer.window;
  step.sinks = layer.sinks ? layer.sinks->ptr<float>() : nullptr;
  return step;
}

void run(const AttentionStep& step, Pool& pool) {
  // The calling thread's; the others only read it.
  thread_local AttentionSchedule own_schedule;
  thread_local AttentionScratch own_partials;
  own_schedule.build(step, pool.threads());
  const AttentionSchedule& schedule = own_schedule;
  float* partials = own_partials.need(schedule.partial_floats);
  const int64_t tasks = static_cast<int64_t>(schedule.tasks.size());
  pool.parallel(tasks, schedule.products < kSerialProducts ? tasks : 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const AttentionTask& task = schedule.tasks[static_cast<size_t>(i)];
      if (task.tile)
        attend_tile(step, schedule, task);
      else
        attend_split(step, schedule, task, partials);
    }
  });
  const int64_t merges = static_cast<int64_t>(schedule.merges.size());
  pool.parallel(merges, schedule.partial_floats < kSerialMerges ? merges : 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      merge_splits(step, schedule, schedule.merges[static_cast<size_t>(i)], partials);
  });
}

}  // namespace

void check_scales(const char* op, const LayerPool& pool) {
  const bool wanted = pool.keys.dtype == DType::kI8;
  if (wanted != (pool.key_scales != nullptr) || wanted != (pool.value_scales != nullptr))
    throw std::invalid_argument(std::string(op) + ": key_scales and value_scales must be given for int8, and for no " +
                                "other type of keys, got keys of " + name_of(pool.keys.dtype));
  const bool plain = pool.key_scale == 1.0f && pool.value_scale == 1.0f;
  const bool narrow = pool.keys.dtype == DType::kE4M3 || pool.keys.dtype == DType::kE5M2;
  if (!(pool.key_scale > 0.0f && pool.value_scale > 0.0f) || !(narrow || plain))
    throw std::invalid_argument(std::string(op) + ": key_scale and value_scale must be above 0, and 1 but for fp8, " +
                                "got " + std::to_string(pool.key_scale) + " and " + std::to_string(pool.value_scale));
  for (const Tensor* scales : {pool.key_scales, pool.value_scales}) {
    if (!scales) continue;
    expect_dtype(op, "scales", *scales, DType::kF32);
    expect_shape(op, "scales", *scales, {pool.keys.shape[0], pool.keys.shape[1]});
    if (!scales->contiguous()) refuse(op, "scales", "contiguous", *scales);
  }
}

Tensor attention(const Tensor& q, const LayerPool& pool, const AttentionRows& rows, const AttentionLayer& layer) {
  check_rows(rows);
  check_pool(q, pool);
  with_float(q.dtype, "attention", [](auto) {});
  with_stored(pool.keys.dtype, "attention", [](auto) {});
  if (layer.sinks) {
    expect_dtype("attention", "sinks", *layer.sinks, DType::kF32);
    expect_shape("attention", "sinks", *layer.sinks, {q.shape[1]});
  }
  if (layer.window < 0 || layer.softcap < 0.0f)
    throw std::invalid_argument("attention: window and softcap must be 0 (none) or more");
  Tensor out = Tensor::empty({q.shape[0], q.shape[1] * pool.values.shape[2]}, q.dtype);
  AttentionStep step = step_of(q, pool, rows, layer);
  step.out = out.data;
  dispatch({&q, &pool.keys, &pool.values, pool.key_scales, pool.value_scales, &rows.table, &rows.row_ids,
            &rows.query_starts, &rows.seq_lens, layer.sinks, &out},
           [step](Pool& pool) { run(step, pool); });
  return out;
}

}  // namespace cardan_native

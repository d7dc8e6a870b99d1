#include <nanobind/ndarray.h>

#include "bind/bind.h"
#include "ops/attention.h"

namespace cardan_native {
namespace {

using Flat = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Grouped = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void change_table(const Tensor& table, const Flat& rows, const Flat& positions, const Grouped& slots,
                  int64_t num_slots) {
  const size_t count = rows.shape(0);
  if (positions.shape(0) != count || slots.shape(1) != count || static_cast<int64_t>(slots.shape(0)) != table.shape[0])
    throw std::invalid_argument("write_table: rows and positions [n] and slots [groups, n] must agree for " +
                                table.describe() + ", got " + std::to_string(count) + ", " +
                                std::to_string(positions.shape(0)) + " and [" + std::to_string(slots.shape(0)) + ", " +
                                std::to_string(slots.shape(1)) + "]");
  write_table(table, {rows.data(), positions.data(), slots.data(), static_cast<int64_t>(count)}, num_slots);
}

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<AttentionRows>(module, "AttentionRows", "Which sequences a step attends for; int32 tensors.")
      .def("__init__",
           [](AttentionRows* self, const Tensor& table, int64_t group, const Tensor& row_ids,
              const Tensor& query_starts, const Tensor& seq_lens) {
             new (self) AttentionRows{table, group, row_ids, query_starts, seq_lens};
           },
           nb::arg("table"), nb::arg("group"), nb::arg("row_ids"), nb::arg("query_starts"), nb::arg("seq_lens"));
  module.def(
      "attention",
      [](const Tensor& q, const Tensor& keys, const Tensor& values, const AttentionRows& rows, float scale,
         int64_t window, float softcap, const Tensor* sinks, const Tensor* key_scales, const Tensor* value_scales,
         float key_scale, float value_scale) {
        return attention(q, {keys, values, key_scales, value_scales, key_scale, value_scale}, rows,
                         {scale, window, softcap, sinks});
      },
      nb::arg("q"), nb::arg("keys"), nb::arg("values"), nb::arg("rows"), nb::arg("scale"), nb::arg("window") = 0,
      nb::arg("softcap") = 0.0f, nb::arg("sinks").none() = nb::none(),
      nb::arg("key_scales").none() = nb::none(), nb::arg("value_scales").none() = nb::none(),
      nb::arg("key_scale") = 1.0f, nb::arg("value_scale") = 1.0f, Unlocked(),
      "Attend with q [tokens, q_heads, k_dim]; returns [tokens, q_heads * v_dim]. 0 means no window, no soft-cap. "
      "Scales [slots, kv_heads] go with int8, the layer's own with floats of 8 bits.");
  module.def("write_kv",
             [](const Tensor& k, const Tensor& v, const Tensor& keys, const Tensor& values, const Tensor& out_slots,
                int64_t group, const Tensor* key_scales, const Tensor* value_scales, float key_scale,
                float value_scale) {
               write_kv(k, v, {keys, values, key_scales, value_scales, key_scale, value_scale}, out_slots, group);
             },
             nb::arg("k"), nb::arg("v"), nb::arg("keys"), nb::arg("values"), nb::arg("out_slots"), nb::arg("group"),
             nb::arg("key_scales").none() = nb::none(), nb::arg("value_scales").none() = nb::none(),
             nb::arg("key_scale") = 1.0f, nb::arg("value_scale") = 1.0f, Unlocked(),
             "Write k and v [tokens, kv_heads, dim] to their slots; tokens of negative slots are left out.");
  module.def("write_table", &change_table, nb::arg("table"), nb::arg("rows"), nb::arg("positions"), nb::arg("slots"),
             nb::arg("num_slots"), "table[group][rows, positions] = slots[group] for all groups.");
}

}  // namespace cardan_native

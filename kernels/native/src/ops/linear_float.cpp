// Products of float activations with weights widened to float32. Those of few rows with dense weights are here: several
// panels at once, so that no sum waits for itself.

#include <algorithm>
#include <type_traits>

#include "ops/linear_call.h"
#include "ops/linear_choice.h"
#include "ops/linear_float.h"

namespace cardan_native {
namespace {

template <int kRows>
constexpr int kPanelsTogether = std::max(1, 8 / (kRows * kPanelVectors));

template <int kRows, int kPanels>
using Totals = vf[kRows][kPanels][kPanelVectors];

template <class T, int kRows, int kPanels>
inline void add_products(const T* const* panels, int64_t columns, const FloatRows& x, Totals<kRows, kPanels>& totals) {
  const auto add = [&](int panel, int v, vf weight, int64_t column) {
    for (int row = 0; row < kRows; ++row)
      totals[row][panel][v] = fused(weight, splat(x.data[row * x.stride + column]), totals[row][panel][v]);
  };
  if constexpr (std::is_same_v<T, bf16>) {
    for (int64_t column = 0; column < columns; column += 2)
      for (int panel = 0; panel < kPanels; ++panel)
        for (int v = 0; v < kPanelVectors; ++v) {
          const PairOf pair = load_pair(panels[panel] + column * kPanel + v * kLanes * 2);
          add(panel, v, pair.even, column);
          if (column + 1 < columns) add(panel, v, pair.odd, column + 1);
        }
  } else {
    for (int64_t column = 0; column < columns; ++column)
      for (int panel = 0; panel < kPanels; ++panel)
        for (int v = 0; v < kPanelVectors; ++v)
          add(panel, v, load(panels[panel] + column * kPanel + v * kLanes), column);
  }
}

template <class T, int kRows, int kPanels>
void multiply_panels(const LinearCall& call, const FloatRows& x, int64_t first) {
  const T* panels[kPanels];
  for (int panel = 0; panel < kPanels; ++panel)
    panels[panel] = reinterpret_cast<const T*>(call.weight->panel_codes(first + panel));
  Totals<kRows, kPanels> totals = {};
  const int64_t even = call.weight->columns / 2 * 2;
  add_products<T, kRows, kPanels>(panels, even, x, totals);
  if (even < call.weight->columns) {
    for (const T*& panel : panels) panel += even * kPanel;
    add_products<T, kRows, kPanels>(panels, 1, {x.data + even, x.stride}, totals);
  }
  for (int panel = 0; panel < kPanels; ++panel) {
    alignas(64) float acc[kRows * kPanel];
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < kPanelVectors; ++v) store(acc + row * kPanel + v * kLanes, totals[row][panel][v]);
    finish(call, first + panel, 1, 0, kRows, acc);
  }
}

template <class T, int kRows>
void multiply_dense(const LinearCall& call, const FloatRows& x, Pool& pool) {
  constexpr int kPanels = kPanelsTogether<kRows>;
  const int64_t panels = call.weight->panels(), bundles = (panels + kPanels - 1) / kPanels;
  pool.parallel(bundles, pool.even_grain(bundles, 8), [&](int64_t first, int64_t last) {
    for (int64_t panel = first * kPanels; panel < std::min(last * kPanels, panels);) {
      if (panel + kPanels <= panels) {
        multiply_panels<T, kRows, kPanels>(call, x, panel);
        panel += kPanels;
      } else {
        multiply_panels<T, kRows, 1>(call, x, panel++);
      }
    }
  });
}

template <class T>
void few_dense_rows(const LinearCall& call, const FloatRows& x, Pool& pool) {
  switch (call.x.rows) {
    case 1:
      return multiply_dense<T, 1>(call, x, pool);
    case 2:
      return multiply_dense<T, 2>(call, x, pool);
    case 3:
      return multiply_dense<T, 3>(call, x, pool);
    default:
      return multiply_dense<T, 4>(call, x, pool);
  }
}

bool few_rows(const PackedLinear& weight, int64_t rows) {
  return takes_few(weight, rows) && weight.codes != Codes::kE4M3 && weight.codes != Codes::kE5M2;
}

void linear_few_dense(const LinearCall& call, Pool& pool) {
  const FloatRows x = widen_rows_of(call, pool);
  if (call.weight->codes == Codes::kF32)
    few_dense_rows<float>(call, x, pool);
  else if (call.weight->codes == Codes::kBF16)
    few_dense_rows<bf16>(call, x, pool);
  else
    few_dense_rows<f16>(call, x, pool);
}

}  // namespace

int64_t float_bytes(const PackedLinear& weight, const Rows& x) {
  if (!weight.grouped()) return few_rows(weight, x.rows) ? float_rows_bytes(x) : many_dense_bytes(x);
  return takes_few(weight, x.rows) ? few_grouped_bytes(weight, x) : many_grouped_bytes(weight, x);
}

void linear_float(const LinearCall& call, Pool& pool) {
  const bool few = takes_few(*call.weight, call.x.rows);
  if (call.weight->grouped()) return few ? linear_few_grouped(call, pool) : linear_many_grouped(call, pool);
  return few_rows(*call.weight, call.x.rows) ? linear_few_dense(call, pool) : linear_many_dense(call, pool);
}

}  // namespace cardan_native

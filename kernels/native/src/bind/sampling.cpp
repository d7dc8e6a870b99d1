#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "ops/elementwise.h"
#include "ops/gumbel.h"
#include "ops/logits.h"
#include "ops/select.h"

namespace cardan_native {
namespace {

void bind_selection(nb::module_& module) {
  module.def("where", &where, nb::arg("condition"), nb::arg("a"), nb::arg("b"), Unlocked(),
             "a where the condition holds, else b: a tensor, a column or a number.");
  module.def("compare", &compare, nb::arg("a"), nb::arg("relation"), nb::arg("b"), Unlocked(),
             "Bool: a < b, <=, >, >=, == or !=; b is a tensor, a column or a number.");
  module.def("arithmetic", &arithmetic, nb::arg("a"), nb::arg("operation"), nb::arg("b"), Unlocked(),
             "a + b, -, * or /; b is a tensor, a column or a number.");
  module.def("is_nan", &is_nan, nb::arg("x"), Unlocked(), "Whether each row holds a NaN.");
  module.def("take_columns", &take_columns, nb::arg("x"), nb::arg("index"), Unlocked(), "x[i, index[i, j]].");
  module.def("scatter_add", &scatter_add, nb::arg("x"), nb::arg("rows"), nb::arg("columns"), nb::arg("values"),
             Unlocked(), "x with values added at (rows, columns), in place where x is contiguous.");
  module.def("unpack_bits", &unpack_bits, nb::arg("mask"), nb::arg("columns"), Unlocked(),
             "Bool [rows, columns] from packed words.");
}

}  // namespace

void bind_sampling(nb::module_& module) {
  bind_selection(module);
  module.def("exp", &exponential, nb::arg("x"), Unlocked(), "e to the x.");
  module.def("logsumexp", &logsumexp, nb::arg("x"), Unlocked(), "log(sum(exp(x))) of each row.");
  module.def("log_softmax", &log_softmax, nb::arg("x"), Unlocked(), "x - logsumexp(x).");
  module.def("argmax", &argmax, nb::arg("x"), Unlocked(), "Index of the first largest entry of each row.");
  module.def("cumsum", &cumsum, nb::arg("x"), Unlocked(), "Running sums over the last axis.");
  module.def("topk", &topk, nb::arg("x"), nb::arg("k"), Unlocked(),
             "The k largest of each row, largest first, equal values by lower index first.");
  module.def("gumbel", &gumbel, nb::arg("seeds"), nb::arg("positions"), nb::arg("ids"), Unlocked(),
             "Gumbel noise of tokens [rows, k].");
  module.def("gumbel_all", &gumbel_all, nb::arg("seeds"), nb::arg("positions"), nb::arg("width"), Unlocked(),
             "Gumbel noise of all tokens below a vocabulary's width.");
}

}  // namespace cardan_native

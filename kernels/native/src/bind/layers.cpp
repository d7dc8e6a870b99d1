#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "ops/elementwise.h"
#include "ops/layout.h"
#include "ops/norm.h"
#include "ops/rope.h"

namespace cardan_native {
namespace {

void bind_norms(nb::module_& module) {
  module.def("rms_norm", &rms_norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), Unlocked(),
             "x / sqrt(mean(x^2) + eps) * weight over the last axis; weight is float32.");
  module.def("add_rms_norm", &add_rms_norm, nb::arg("x"), nb::arg("residual"), nb::arg("weight"), nb::arg("eps"),
             Unlocked(), "The norm of x + residual, and the sum.");
  module.def("layer_norm", &layer_norm, nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("eps"),
             Unlocked(), "(x - mean) / sqrt(var + eps) * weight + bias over the last axis; both are float32.");
}

void bind_elementwise(nb::module_& module) {
  module.def("add", &add, nb::arg("a"), nb::arg("b"), Unlocked(), "a + b; b may lack leading axes of a.");
  module.def("mul", &mul, nb::arg("a"), nb::arg("b"), Unlocked(), "a * b; b may lack leading axes of a.");
  module.def("scale", &scale, nb::arg("x"), nb::arg("factor"), Unlocked(), "x * factor in the type of x.");
  module.def("silu", &silu, nb::arg("x"), Unlocked(), "x * sigmoid(x).");
  module.def("gelu", &gelu, nb::arg("x"), nb::arg("approximate"), Unlocked(), "GELU, exact or approximated by tanh.");
  module.def("tanh_softcap", &tanh_softcap, nb::arg("x"), nb::arg("cap"), Unlocked(), "cap * tanh(x / cap).");
  module.def("silu_mul", &silu_mul, nb::arg("gate_up"), nb::arg("size"), Unlocked(),
             "silu(gate) * up of [..., 2 * size], the gates first.");
  module.def("gelu_mul", &gelu_mul, nb::arg("gate_up"), nb::arg("size"), nb::arg("approximate"), Unlocked(),
             "gelu(gate) * up of [..., 2 * size], the gates first.");
  module.def("cast", [](const Tensor& x, const std::string& dtype) { return cast(x, dtype_of(dtype)); }, nb::arg("x"),
             nb::arg("dtype"), Unlocked(), "The values in another type; of the same type it is the tensor itself.");
}

}  // namespace

void bind_layers(nb::module_& module) {
  bind_norms(module);
  bind_elementwise(module);
  module.def("rope", &rope, nb::arg("x"), nb::arg("positions"), nb::arg("cos"), nb::arg("sin"), nb::arg("interleaved"),
             Unlocked(), "Rotate the first 2 * cos.width features of each head of [tokens, heads, dim] by positions.");
  module.def("concat", &concat, nb::arg("parts"), Unlocked(), "Join along the last axis.");
  module.def("gather_rows", &gather_rows, nb::arg("x"), nb::arg("index"), Unlocked(),
             "Entries of the first axis by int32 index.");
  module.def("permute_columns", &permute_columns, nb::arg("x"), nb::arg("order"), Unlocked(),
             "Columns of the last axis by int32 index, one for each.");
  module.def("scatter_rows", &scatter_rows, nb::arg("x"), nb::arg("index"), nb::arg("values"), Unlocked(),
             "x with entries of the first axis replaced, in place where x is contiguous.");
}

}  // namespace cardan_native

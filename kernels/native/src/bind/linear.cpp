#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "ops/linear.h"
#include "ops/linear_choice.h"

namespace cardan_native {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Activations activations_of(const std::string& name) {
  if (name == "float") return Activations::kFloat;
  if (name == "int8") return Activations::kInt8;
  if (name == "int16") return Activations::kInt16;
  throw std::invalid_argument("pack_linear: activations must be int8, int16 or float, got '" + name + "'");
}

const char* name_of(Activations activations) {
  if (activations == Activations::kFloat) return "float";
  return activations == Activations::kInt8 ? "int8" : "int16";
}

Weight pack_linear(const std::string& format, const std::vector<Bytes>& parts, const std::vector<int64_t>& rows,
                   int64_t in_features, const std::string& dtype, const Tensor* bias, const std::string& activations,
                   const std::map<std::string, int64_t>& crossovers) {
  if (parts.size() != rows.size())
    throw std::invalid_argument("pack_linear: " + std::to_string(parts.size()) +
                                " parts need as many counts of rows, got " + std::to_string(rows.size()));
  PackRequest request;
  request.format = format;
  request.columns = in_features;
  request.dtype = dtype_of(dtype);
  request.activations = activations_of(activations);
  request.bias = bias;
  request.crossovers = crossovers;
  for (size_t i = 0; i < parts.size(); ++i)
    request.parts.push_back({parts[i].data(), static_cast<int64_t>(parts[i].size()), rows[i]});
  const nb::gil_scoped_release unlocked;
  return pack(request);
}

// Every crossover of a weight that there is a choice for: least, most and chosen number of rows by name.
std::map<std::string, std::tuple<int64_t, int64_t, int64_t>> crossovers_of_weight(const PackedLinear& weight) {
  std::map<std::string, std::tuple<int64_t, int64_t, int64_t>> found;
  const auto add = [&](const char* name, CrossoverRange range, int64_t chosen) {
    if (range.least < range.most) found[kind_of(weight) + name] = {range.least, range.most, chosen};
  };
  add(".few", few_range(weight), weight.crossovers.few);
  add(".many", many_range(weight), weight.crossovers.many);
  return found;
}

}  // namespace

void bind_linear(nb::module_& module) {
  nb::class_<PackedLinear>(module, "PackedLinear", "A weight as the kernels of linears read it.")
      .def_prop_ro("num_bytes", &PackedLinear::num_bytes, "Bytes of codes, scales and bias.")
      .def_prop_ro("rows", [](const PackedLinear& x) { return x.rows; }, "Output features.")
      .def_prop_ro("columns", [](const PackedLinear& x) { return x.columns; }, "Inner features.")
      .def_prop_ro("activations", [](const PackedLinear& x) { return name_of(x.activations); },
                   "What activations are rounded to before they are multiplied: int8, int16, or float for nothing.")
      .def_prop_ro("crossovers", &crossovers_of_weight,
                   "Numbers of rows at which kernels change, by name: least, most and chosen.");
  module.def("packable_formats", &packable_formats, "Names of the formats that pack_linear takes.");
  module.def("pack_linear", &pack_linear, nb::arg("format"), nb::arg("parts"), nb::arg("rows"), nb::arg("in_features"),
             nb::arg("dtype"), nb::arg("bias") = nb::none(), nb::arg("activations") = "float",
             nb::arg("crossovers") = std::map<std::string, int64_t>(),
             "Pack the rows of all parts, uint8 arrays in one format, for activations of a type.");
  module.def("linear", [](const Tensor& x, const Weight& weight) {
               return linear("linear", x, weight, nullptr, x.dtype);
             },
             nb::arg("x"), nb::arg("weight"), Unlocked(), "x @ weight.T + bias, in the type of x.");
  module.def("linear_add", [](const Tensor& x, const Weight& weight, const Tensor& residual) {
               return linear("linear_add", x, weight, &residual, x.dtype);
             },
             nb::arg("x"), nb::arg("weight"), nb::arg("residual"), Unlocked(),
             "residual + x @ weight.T + bias, rounded once.");
  module.def("linear_float32", [](const Tensor& x, const Weight& weight) {
               return linear("linear_float32", x, weight, nullptr, DType::kF32);
             },
             nb::arg("x"), nb::arg("weight"), Unlocked(), "As linear, in float32.");
  module.def("linear_kernel", &kernel_of, nb::arg("weight"), nb::arg("rows"),
             "Which kernel is taken for so many rows of activations: registers, cache or many.");
  module.def("gather_rows", &gather_weight_rows, nb::arg("weight"), nb::arg("ids"), Unlocked(),
             "Rows of the weight, in the type of its activations.");
}

}  // namespace cardan_native

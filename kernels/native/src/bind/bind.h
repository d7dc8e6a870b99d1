// One function per family of ops; each adds what Python sees of it to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace cardan_native {

namespace nb = nanobind;

void bind_core(nb::module_& module);  // Tensor, Graph, threads
void bind_layers(nb::module_& module);
void bind_linear(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_sampling(nb::module_& module);

// Kernels run without the interpreter's lock.
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

}  // namespace cardan_native

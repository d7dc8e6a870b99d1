// The module that says which variants can run here.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "isa.h"

NB_MODULE(_probe, module) {
  module.def("runnable", &cardan_native::runnable_variants, "Variants that can run here, the plainest first.");
}

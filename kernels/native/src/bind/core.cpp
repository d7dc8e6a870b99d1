#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bind/bind.h"
#include "core/dispatch.h"
#include "core/graph.h"
#include "core/tensor.h"
#include "core/threads.h"

namespace cardan_native {
namespace {

using Host = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

// Bits of a contiguous numpy array, under the dtype that the caller names; bfloat16 comes as uint16.
void copy_bits(Tensor& to, const Host& from) {
  if (from.nbytes() != static_cast<size_t>(to.size()) * size_of(to.dtype))
    throw std::invalid_argument("the array has " + std::to_string(from.nbytes()) + " bytes, but " + to.describe() +
                                " takes " + std::to_string(to.size() * static_cast<int64_t>(size_of(to.dtype))));
  if (!to.contiguous()) throw std::invalid_argument("only a contiguous tensor can be filled, got " + to.describe());
  std::memcpy(to.data, from.data(), from.nbytes());
}

Tensor lasting(const Shape& dims, const std::string& dtype) { return Tensor::lasting(dims, dtype_of(dtype)); }

Tensor zeros(const Shape& dims, const std::string& dtype) { return Tensor::zeros(dims, dtype_of(dtype)); }

Tensor from_bits(const Host& array, const std::string& dtype) {
  Shape dims(array.shape_ptr(), array.shape_ptr() + array.ndim());
  Tensor out = Tensor::lasting(dims, dtype_of(dtype));
  copy_bits(out, array);
  return out;
}

// The tensor's own memory as an array: uint16 for narrow floats, uint8 for bools. It stays valid as long as the array.
nb::object bits(const Tensor& x) {
  auto* share = new std::shared_ptr<Storage>(x.storage);
  nb::capsule owner(share, [](void* held) noexcept { delete static_cast<std::shared_ptr<Storage>*>(held); });
  size_t dims[4];
  int64_t strides[4];
  for (int axis = 0; axis < x.rank; ++axis) {
    dims[axis] = static_cast<size_t>(x.shape[axis]);
    strides[axis] = x.strides[axis];
  }
  const auto make = [&]<class T>(T) {
    return nb::cast(nb::ndarray<nb::numpy, T>(x.data, static_cast<size_t>(x.rank), dims, owner, strides));
  };
  switch (x.dtype) {
    case DType::kF32:
      return make(float{});
    case DType::kI32:
      return make(int32_t{});
    case DType::kBF16:
    case DType::kF16:
      return make(uint16_t{});
    case DType::kI8:
      return make(int8_t{});
    default:
      return make(uint8_t{});
  }
}

void bind_tensor(nb::module_& module) {
  nb::class_<Tensor>(module, "Tensor", "A tensor; see `bits` for its memory and `dtype` for how to read it.")
      .def_static("empty", &lasting, nb::arg("shape"), nb::arg("dtype"), "Memory with whatever was in it.")
      .def_static("zeros", &zeros, nb::arg("shape"), nb::arg("dtype"),
                  "Zeros, committed page by page as they are touched.")
      .def_static("from_bits", &from_bits, nb::arg("array"), nb::arg("dtype"),
                  "A copy of a contiguous numpy array; bfloat16 and float16 are given as uint16, bool as uint8.")
      .def("copy_bits", &copy_bits, nb::arg("array"), "Overwrite the contents in place.")
      .def("bits", &bits,
           "The memory as a numpy array, not copied; narrow floats come as uint16 or uint8, bool as uint8.")
      .def_prop_ro("dtype", [](const Tensor& x) { return name_of(x.dtype); })
      .def_prop_ro("shape", [](const Tensor& x) { return nb::tuple(nb::cast(x.dims())); })
      .def_prop_ro("nbytes", [](const Tensor& x) { return x.size() * static_cast<int64_t>(size_of(x.dtype)); })
      .def("columns", &Tensor::columns, nb::arg("start"), nb::arg("count"), "A view of some of the last axis.")
      .def("split_heads", &Tensor::split_heads, nb::arg("heads"), "A view of [..., heads * dim] as [..., heads, dim].")
      .def("merge_heads", &Tensor::merge_heads, Unlocked(),
           "[..., heads, dim] as [..., heads * dim]; a view where that can be.")
      .def("reshaped", &Tensor::reshaped, nb::arg("shape"), Unlocked(), "A view where it is contiguous, else a copy.")
      .def("contiguous", [](const Tensor& x) { return x.contiguous() ? x : x.contiguous_copy(); },
           "Itself where it is contiguous, else a copy.")
      .def("__repr__", [](const Tensor& x) { return "Tensor(" + x.describe() + ")"; });
}

void bind_graph(nb::module_& module) {
  nb::class_<Graph>(module, "Graph", "A recorded list of kernels; use it as a context to record.")
      .def(nb::init<>())
      .def("__enter__", [](Graph& graph) -> Graph& { graph.begin(); return graph; }, nb::rv_policy::reference)
      .def("__exit__", [](Graph& graph, nb::args) { graph.end(); })
      .def("replay", [](const Graph& graph) { graph.replay(Pool::get()); }, Unlocked(), "Run all kernels again.")
      .def("__len__", &Graph::num_kernels)
      .def_prop_ro("num_bytes", [](const Graph& graph) { return graph.allocator()->held_bytes(); },
                   "Bytes of the buffers that it holds.");
}

}  // namespace

void bind_core(nb::module_& module) {
  bind_tensor(module);
  bind_graph(module);
  module.def("set_threads", [](int threads, bool pin, int spin_us) { Pool::get().resize(threads, {spin_us, pin}); },
             nb::arg("threads"), nb::arg("pin") = false, nb::arg("spin_us") = PoolOptions().spin_us, Unlocked(),
             "How many threads compute, the caller's among them; whether each keeps to a core, where that does no "
             "harm; and for how many microseconds they spin before they yield and sleep.");
  module.def("pinned", [] { return Pool::get().pinned(); }, "Whether threads keep to a core each.");
  module.def("threads", [] { return Pool::get().threads(); }, "How many threads compute.");
}

}  // namespace cardan_native

// How an op runs its kernel: at once, and into the graph that records, if one does.
#pragma once

#include <initializer_list>
#include <span>
#include <utility>

#include "core/graph.h"
#include "core/threads.h"

namespace cardan_native {

// Runs `kernel(pool)`. It must hold plain pointers and numbers only, not tensors: a recorded kernel that held a share
// in its buffers would keep the graph from reusing them. `used` names every tensor whose memory it touches; null
// stands for one that is not there.
template <class Body>
void dispatch(std::span<const Tensor* const> used, Body&& kernel) {
  kernel(Pool::get());
  if (Graph* graph = Graph::recording()) graph->append(used, Kernel(std::forward<Body>(kernel)));
}

template <class Body>
void dispatch(std::initializer_list<const Tensor*> used, Body&& kernel) {
  dispatch(std::span<const Tensor* const>(used.begin(), used.size()), std::forward<Body>(kernel));
}

}  // namespace cardan_native

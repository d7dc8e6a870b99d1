// A recorded list of kernels over fixed buffers, run again by one call.
//
// While a graph records, the ops of its thread run as ever and are also appended to it; their outputs come from the
// graph's own allocator, which reuses a buffer as soon as the tensor that had it is gone. Replay runs the same kernels
// in the same order over the same buffers, so what was read from the host meanwhile is read again as it is by then.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/storage.h"
#include "core/tensor.h"

namespace cardan_native {

class Pool;
using Kernel = std::function<void(Pool&)>;

class Graph {
 public:
  Graph();
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // The graph that records on this thread, or null.
  static Graph* recording();

  void begin();  // throws std::logic_error while one records already on this thread
  void end();
  void replay(Pool& pool) const;

  // Called by `dispatch`: append a kernel, and keep alive what it uses that is not this graph's own.
  void append(std::span<const Tensor* const> used, Kernel kernel);
  // Keep something alive as long as the graph: weights, tables.
  void keep(std::shared_ptr<void> what);

  std::shared_ptr<Allocator> allocator() const { return allocator_; }
  size_t num_kernels() const { return kernels_.size(); }

 private:
  std::shared_ptr<Allocator> allocator_;
  std::vector<Kernel> kernels_;
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace cardan_native

#include "core/graph.h"

#include <limits>
#include <stdexcept>

#include "core/threads.h"

namespace cardan_native {
namespace {

// Of one thread: what others compute meanwhile belongs to no graph.
thread_local Graph* recording_now = nullptr;

}  // namespace

Graph::Graph() : allocator_(std::make_shared<Allocator>(std::numeric_limits<size_t>::max())) {}

Graph::~Graph() { end(); }

Graph* Graph::recording() { return recording_now; }

void Graph::begin() {
  if (recording_now) throw std::logic_error("a graph records already on this thread; end it first");
  recording_now = this;
}

void Graph::end() {
  if (recording_now == this) recording_now = nullptr;
}

void Graph::replay(Pool& pool) const {
  for (const Kernel& kernel : kernels_) kernel(pool);
}

void Graph::append(std::span<const Tensor* const> used, Kernel kernel) {
  for (const Tensor* tensor : used)
    if (tensor && tensor->storage && tensor->storage->owner != allocator_) kept_.push_back(tensor->storage);
  kernels_.push_back(std::move(kernel));
}

void Graph::keep(std::shared_ptr<void> what) { kept_.push_back(std::move(what)); }

}  // namespace cardan_native

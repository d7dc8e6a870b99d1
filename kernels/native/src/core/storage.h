// Blocks of aligned memory, and the allocators that hand them out again and again.
//
// Outputs of ops live for microseconds: a fresh block from the system would be paged in each time. A graph that records
// has an allocator of its own, so that its buffers stay where they are until it goes.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace cardan_native {

class Allocator;

// A block; it goes back to its allocator, or to the system, with the last tensor that uses it.
struct Storage {
  char* data = nullptr;
  size_t bytes = 0;
  std::shared_ptr<Allocator> owner;  // null: the system's

  Storage() = default;
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;
  ~Storage();
};

class Allocator : public std::enable_shared_from_this<Allocator> {
 public:
  // When free blocks would exceed `most_kept` bytes, those that wait already go back to the system.
  explicit Allocator(size_t most_kept) : most_kept_(most_kept) {}
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;
  ~Allocator();

  // A block of at least `bytes`, aligned to 64; its contents are whatever was there. Throws std::bad_alloc.
  std::shared_ptr<Storage> take(size_t bytes);

  // Bytes of all blocks that this allocator has made and not returned to the system.
  size_t held_bytes() const;

 private:
  friend struct Storage;
  void give_back(char* data, size_t bytes);
  void release_free();  // the caller holds the lock

  mutable std::mutex mutex_;
  std::map<size_t, std::vector<char*>> free_;  // by size
  size_t free_bytes_ = 0, held_bytes_ = 0, most_kept_;
};

// Zeros from the system, whose pages are committed only when they are first touched; for pools and weights.
std::shared_ptr<Storage> zeroed_storage(size_t bytes);

// What is not an output of an op (copies of host arrays) comes from the process's own, also while a graph records: its
// contents are not computed again by a replay, so its memory must not be given to another tensor.
const std::shared_ptr<Allocator>& process_allocator();

// The allocator that ops take their outputs from: that of the graph being recorded, else the process's own.
std::shared_ptr<Allocator> current_allocator();

}  // namespace cardan_native

#include "core/storage.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>

#include "core/graph.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace cardan_native {
namespace {

// Under the address sanitizer what is beyond a tensor, and what nobody holds, must not be touched: blocks are larger
// than asked for and used again, so that the sanitizer has to be told.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGuard = 64;
void hide(const char* data, size_t bytes) { __asan_poison_memory_region(data, bytes); }
void show(const char* data, size_t bytes) { __asan_unpoison_memory_region(data, bytes); }
#else
constexpr size_t kGuard = 0;
void hide(const char*, size_t) {}
void show(const char*, size_t) {}
#endif

constexpr size_t kAlignment = 64;
constexpr size_t kMostKept = size_t{256} << 20;

// Blocks from this size on come from the system and go back to it one by one: the C library would keep those between.
constexpr size_t kMapped = size_t{1} << 20;

void* map_pages(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(data, bytes, MADV_HUGEPAGE);
#endif
  return data;
}

char* make_block(size_t bytes) {
  if (bytes >= kMapped) return static_cast<char*>(map_pages(bytes));
  void* data = std::aligned_alloc(kAlignment, bytes);
  if (!data) throw std::bad_alloc();
  return static_cast<char*>(data);
}

void free_block(char* data, size_t bytes) {
  show(data, bytes);
  if (bytes >= kMapped)
    munmap(data, bytes);
  else
    std::free(data);
}

// Sizes are rounded up to a sixteenth of their power of two, so that tensors of like size share blocks.
size_t rounded(size_t bytes) {
  if (bytes <= kAlignment) return kAlignment;
  const size_t step = std::max(kAlignment, std::bit_floor(bytes) / 16);
  return (bytes + step - 1) / step * step;
}

}  // namespace

Storage::~Storage() {
  if (owner) {
    owner->give_back(data, bytes);
  } else if (data) {
    show(data, bytes);
    munmap(data, bytes);
  }
}

Allocator::~Allocator() { release_free(); }

std::shared_ptr<Storage> Allocator::take(size_t bytes) {
  auto storage = std::make_shared<Storage>();
  const size_t size = rounded(bytes + kGuard);
  {
    std::lock_guard lock(mutex_);
    auto found = free_.find(size);
    if (found != free_.end() && !found->second.empty()) {
      storage->data = found->second.back();
      found->second.pop_back();
      free_bytes_ -= size;
    } else {
      storage->data = make_block(size);
      held_bytes_ += size;
    }
  }
  // A graph writes its blocks again at every replay, whoever had them last.
  if (kGuard && this == process_allocator().get()) {
    show(storage->data, bytes);
    hide(storage->data + bytes, size - bytes);
  }
  storage->bytes = size;
  storage->owner = shared_from_this();
  return storage;
}

size_t Allocator::held_bytes() const {
  std::lock_guard lock(mutex_);
  return held_bytes_;
}

void Allocator::give_back(char* data, size_t bytes) {
  if (kGuard && this == process_allocator().get()) hide(data, bytes);
  std::lock_guard lock(mutex_);
  // Blocks of sizes that nobody asks for any more would fill the allowance for ever, so the older ones go.
  if (free_bytes_ + bytes > most_kept_) release_free();
  if (bytes > most_kept_) {
    free_block(data, bytes);
    held_bytes_ -= bytes;
    return;
  }
  free_[bytes].push_back(data);
  free_bytes_ += bytes;
}

void Allocator::release_free() {
  for (auto& [size, blocks] : free_)
    for (char* block : blocks) free_block(block, size);
  free_.clear();
  held_bytes_ -= free_bytes_;
  free_bytes_ = 0;
}

std::shared_ptr<Storage> zeroed_storage(size_t bytes) {
  auto storage = std::make_shared<Storage>();
  const size_t size = std::max(bytes, size_t{1}) + kGuard;
  storage->data = static_cast<char*>(map_pages(size));
  storage->bytes = size;
  hide(storage->data + bytes, size - bytes);
  return storage;
}

const std::shared_ptr<Allocator>& process_allocator() {
  static const auto own = std::make_shared<Allocator>(kMostKept);
  return own;
}

std::shared_ptr<Allocator> current_allocator() {
  Graph* graph = Graph::recording();
  return graph ? graph->allocator() : process_allocator();
}

}  // namespace cardan_native

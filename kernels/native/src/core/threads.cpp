#include "core/threads.h"

#include <pthread.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cardan_native {
namespace {

constexpr int kSpins = 4000;  // some tens of microseconds, which covers the gaps between the ops of a step
constexpr int kYields = 200;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

Pool& Pool::get() {
  static Pool* const pool = new Pool;
  return *pool;
}

void Pool::resize(int threads) {
  std::lock_guard lock(caller_);
  stop();
  threads = std::max(1, threads);
  stopping_ = false;
  owner_ = getpid();
  const uint32_t seen = epoch_.load();
  for (int index = 1; index < threads; ++index) workers_.emplace_back([this, seen] { serve(seen); });
  threads_ = threads;
}

void Pool::stop() {
  if (workers_.empty()) return;
  if (owner_ != getpid()) {
    // After a fork the threads are the parent's: here is nothing to join, and their handles must not be destroyed.
    static auto* const lost = new std::vector<std::vector<std::thread>>;
    lost->push_back(std::move(workers_));
    workers_.clear();
    inside_ = 0;
    return;
  }
  stopping_ = true;
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

// A worker adds itself to `inside_` and then looks whether the loop is open; the caller closes the loop and then looks
// whether anybody is inside. All four are sequentially consistent, so one of the two sees the other: either the worker
// leaves, or the caller waits for it. So nobody reads `loop_` or calls the body once `run` has returned, and a worker
// that slept through some loops finds the one that is open by then.
void Pool::run(const Loop& loop) {
  std::lock_guard lock(caller_);
  loop_ = loop;
  next_.store(0);
  open_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  work();
  open_.store(false);
  for (int spins = 0; inside_.load() != 0; ++spins) spins < kSpins ? relax() : std::this_thread::yield();
}

void Pool::work() {
  const Loop loop = loop_;
  for (;;) {
    const int64_t first = next_.fetch_add(loop.grain, std::memory_order_relaxed);
    if (first >= loop.count) return;
    loop.call(loop.body, first, std::min(first + loop.grain, loop.count));
  }
}

void Pool::serve(uint32_t seen) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "cardan-compute");
#endif
  for (;;) {
    for (int turn = 0; epoch_.load(std::memory_order_acquire) == seen; ++turn) {
      if (turn < kSpins)
        relax();
      else if (turn < kSpins + kYields)
        std::this_thread::yield();
      else
        epoch_.wait(seen, std::memory_order_acquire);
    }
    seen = epoch_.load();
    if (stopping_) return;
    inside_.fetch_add(1);
    if (open_.load()) work();
    inside_.fetch_sub(1);
  }
}

}  // namespace cardan_native

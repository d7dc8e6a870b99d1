// The thread pool: a few threads that share out pieces of one loop at a time.
//
// Pieces are taken one by one, so a thread whose core is busy with something else takes fewer. Threads wait for the
// next loop by spinning for some microseconds, then yielding, then sleeping. The caller works too and is one of them.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace cardan_native {

class Pool {
 public:
  // The process's own. It is never destroyed: its threads wait on it until the process ends.
  static Pool& get();

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // How many threads work, the caller among them. Waits for a loop that runs.
  void resize(int threads);
  int threads() const { return threads_.load(std::memory_order_relaxed); }

  // Calls body(first, last) for pieces of [0, count) of at most `grain`, on all threads; returns when all are done.
  // Where one thread is enough, the whole range is one piece. Bodies must not throw, nor start a loop of their own.
  template <class Body>
  void parallel(int64_t count, int64_t grain, const Body& body) {
    if (count <= 0) return;
    if (grain < 1) grain = 1;
    // Through the same pointer in both cases, so that each body is compiled once.
    void (*const call)(const void*, int64_t, int64_t) = [](const void* self, int64_t first, int64_t last) {
      (*static_cast<const Body*>(self))(first, last);
    };
    if (threads() == 1 || count <= grain)
      call(&body, 0, count);
    else
      run({call, &body, count, grain});
  }

  // A grain that gives each thread about `pieces` pieces.
  int64_t even_grain(int64_t count, int64_t pieces = 4) const {
    const int64_t wanted = threads() * pieces;
    return std::max<int64_t>(1, (count + wanted - 1) / wanted);
  }

 private:
  struct Loop {
    void (*call)(const void*, int64_t, int64_t) = nullptr;
    const void* body = nullptr;
    int64_t count = 0, grain = 1;
  };

  Pool() = default;
  void run(const Loop& loop);
  void work();
  void serve(uint32_t seen);
  void stop();

  std::atomic<int> threads_{1};
  std::vector<std::thread> workers_;
  pid_t owner_ = 0;    // the process that started them
  std::mutex caller_;  // one loop at a time
  Loop loop_;
  alignas(64) std::atomic<uint32_t> epoch_{0};  // grows with each loop
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> inside_{0};  // workers that may look at loop_
  alignas(64) std::atomic<bool> open_{false};
  std::atomic<bool> stopping_{false};
};

}  // namespace cardan_native

// The thread pool: a few threads that share out pieces of one loop at a time.
//
// Pieces are taken one by one, so a thread whose core is busy with something else takes fewer. Threads wait for the
// next loop by spinning for some microseconds, then yielding, then sleeping. The caller works too and is one of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace cardan_native {

struct PoolOptions {
  // How long a thread spins before it yields; it yields three times as long before it sleeps. Where a quota limits the
  // processor's time, little: what is spun away is missing later.
  int spin_us = 50;
  // Whether threads keep to a core each, where they may: see `pinnable_cores`.
  bool pin = false;
};

class Pool {
 public:
  // The process's own. It is never destroyed: its threads wait on it until the process ends.
  static Pool& get();

  Pool();
  ~Pool();  // no loop may run
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // How many threads work, the caller among them. Waits for a loop that runs.
  void resize(int threads, PoolOptions options = {});
  int threads() const { return threads_.load(std::memory_order_relaxed); }
  // Whether threads keep to a core each.
  bool pinned() const { return pinned_; }

  // Calls body(first, last) for pieces of [0, count) of at most `grain`, on all threads; returns when all are done.
  // Where one thread is enough, the whole range is one piece. Bodies must not start a loop of their own. What one of
  // them throws is thrown here, once all threads are through; pieces that nobody has begun by then are left out.
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
      run({call, &body, count, grain, 0});
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
    int64_t count = 0, grain = 1, pieces = 0;
  };
  // All that a thread needs to take a piece, in one line of the cache.
  struct alignas(64) Board {
    std::atomic<uint64_t> ticket{kNone};
    Loop loop;
  };
  // The low half of the ticket is this and the number of pieces that nobody has taken; the high half counts loops, so
  // that no two loops' tickets are alike. It stays below this by at most a piece for each thread.
  static constexpr uint32_t kNone = 1u << 30;

  friend struct PoolsAtFork;

  void run(Loop loop);
  int64_t work();
  bool any_left() const { return static_cast<uint32_t>(board_.ticket.load()) > kNone; }
  void wake(int64_t wanted);
  void await(int64_t pieces);
  bool wait();
  void serve(int core);
  void stop();

  Board board_;
  alignas(64) std::atomic<int64_t> done_{0};  // pieces that threads other than the caller have finished
  alignas(64) std::atomic<int> asleep_{0};
  std::atomic<uint32_t> calls_{0};  // what sleepers wait on
  std::atomic<uint32_t> endings_{0};  // what the caller waits on
  std::atomic<bool> caller_asleep_{false}, stopping_{false}, failed_{false};
  std::exception_ptr failure_;  // of the thread that was first to set `failed_`
  std::atomic<int> threads_{1};
  PoolOptions options_;
  bool pinned_ = false;
  std::mutex caller_;  // one loop at a time
  std::vector<std::thread> workers_;
};

}  // namespace cardan_native

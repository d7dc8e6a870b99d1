#include "core/threads.h"

#include <pthread.h>

#include <chrono>

#include "core/affinity.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cardan_native {
namespace {

constexpr unsigned kSpinsPerLook = 32;  // at the clock
constexpr int kYieldsToSpins = 3;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Spins at first, and yields when that has taken long.
class Patience {
 public:
  explicit Patience(int spin_us) : spin_(std::chrono::microseconds(spin_us)) {}

  // Waits a moment; false once it has yielded for long as well.
  bool wait() {
    if (yielding_) {
      std::this_thread::yield();
    } else {
      relax();
      if (++spins_ % kSpinsPerLook) return true;
    }
    const auto waited = std::chrono::steady_clock::now() - start_;
    yielding_ = waited >= spin_;
    return waited < (1 + kYieldsToSpins) * spin_;
  }

 private:
  std::chrono::steady_clock::duration spin_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  unsigned spins_ = 0;
  bool yielding_ = false;
};

}  // namespace

// All pools of the process. A fork waits until none of them runs a loop; in the child their threads are gone.
struct PoolsAtFork {
  std::mutex mutex;
  std::vector<Pool*> pools;

  static PoolsAtFork& get() {
    static PoolsAtFork* const all = new PoolsAtFork;
    return *all;
  }

  PoolsAtFork() { pthread_atfork(&before, &in_parent, &in_child); }

  void add(Pool* pool) {
    std::lock_guard lock(mutex);
    pools.push_back(pool);
  }

  void remove(Pool* pool) {
    std::lock_guard lock(mutex);
    std::erase(pools, pool);
  }

  static void before() {
    get().mutex.lock();
    for (Pool* pool : get().pools) pool->caller_.lock();
  }

  static void in_parent() {
    for (Pool* pool : get().pools) pool->caller_.unlock();
    get().mutex.unlock();
  }

  static void in_child() {
    for (Pool* pool : get().pools) {
      // Here is nothing to join, and handles of threads that were not joined must not be destroyed.
      static auto* const lost = new std::vector<std::vector<std::thread>>;
      lost->push_back(std::move(pool->workers_));
      pool->workers_.clear();
      pool->threads_ = 1;
      pool->asleep_ = 0;
    }
    in_parent();
  }
};

Pool& Pool::get() {
  static Pool* const pool = new Pool;
  return *pool;
}

Pool::Pool() { PoolsAtFork::get().add(this); }

Pool::~Pool() {
  PoolsAtFork::get().remove(this);
  stop();
}

void Pool::resize(int threads, PoolOptions options) {
  std::lock_guard lock(caller_);
  stop();
  threads = std::max(1, threads);
  options_ = options;
  const std::vector<int> cores = options.pin ? pinnable_cores(threads) : std::vector<int>();
  pinned_ = !cores.empty();
  for (int index = 1; index < threads; ++index)
    workers_.emplace_back([this, core = pinned_ ? cores[static_cast<size_t>(index)] : -1] { serve(core); });
  threads_ = threads;
}

void Pool::stop() {
  if (workers_.empty()) return;
  stopping_ = true;
  calls_.fetch_add(1);
  calls_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  threads_ = 1;
  stopping_ = false;
}

// The loop is written before its ticket, and whoever takes a piece by the ticket sees it. It is not written again until
// all pieces are done, and who gets no piece does not look at it; so nobody reads a loop that is being written, nor
// calls a body once `run` has returned, however long a thread was kept from running.
void Pool::run(Loop loop) {
  std::lock_guard lock(caller_);
  loop.grain = std::max(loop.grain, loop.count / (kNone / 2) + 1);
  loop.pieces = (loop.count + loop.grain - 1) / loop.grain;
  board_.loop = loop;
  done_.store(0, std::memory_order_relaxed);
  const uint64_t loops = (board_.ticket.load(std::memory_order_relaxed) >> 32) + 1;
  board_.ticket.store(loops << 32 | (kNone + static_cast<uint64_t>(loop.pieces)));
  wake(loop.pieces - 1);
  const int64_t left = loop.pieces - work();
  if (done_.load(std::memory_order_acquire) != left) await(left);
  if (failed_.load(std::memory_order_acquire)) {
    const std::exception_ptr failure = std::move(failure_);
    failure_ = nullptr;
    failed_ = false;
    std::rethrow_exception(failure);
  }
}

// Takes pieces until there are none; returns how many.
int64_t Pool::work() {
  for (int64_t taken = 0;; ++taken) {
    const uint32_t left = static_cast<uint32_t>(board_.ticket.fetch_sub(1, std::memory_order_acq_rel));
    if (left <= kNone) return taken;
    const Loop& loop = board_.loop;
    if (failed_.load(std::memory_order_relaxed)) continue;
    const int64_t first = (loop.pieces - (left - kNone)) * loop.grain;
    try {
      loop.call(loop.body, first, std::min(first + loop.grain, loop.count));
    } catch (...) {
      const std::exception_ptr caught = std::current_exception();
      if (!failed_.exchange(true)) failure_ = caught;
    }
  }
}

// A sleeper counts itself and then looks for pieces; the caller offers pieces and then looks for sleepers. All four are
// sequentially consistent, so one of the two sees the other.
void Pool::wake(int64_t wanted) {
  const int asleep = asleep_.load();
  if (asleep == 0) return;
  calls_.fetch_add(1);
  if (wanted >= asleep) {
    calls_.notify_all();
  } else {
    for (int64_t woken = 0; woken < wanted; ++woken) calls_.notify_one();
  }
}

// Waits until the others have finished `pieces`. In the end it sleeps: a thread that was interrupted within a piece may
// wait for this very core.
void Pool::await(int64_t pieces) {
  Patience patience(options_.spin_us);
  while (done_.load(std::memory_order_acquire) != pieces) {
    if (patience.wait()) continue;
    const uint32_t endings = endings_.load();
    caller_asleep_ = true;
    if (done_.load() != pieces) endings_.wait(endings);
    caller_asleep_ = false;
  }
}

// Waits for pieces; false when the pool stops.
bool Pool::wait() {
  Patience patience(options_.spin_us);
  while (!any_left()) {
    if (stopping_.load(std::memory_order_acquire)) return false;
    if (patience.wait()) continue;
    const uint32_t calls = calls_.load();
    asleep_.fetch_add(1);
    if (!any_left() && !stopping_.load()) calls_.wait(calls);
    asleep_.fetch_sub(1);
    patience = Patience(options_.spin_us);
  }
  return true;
}

void Pool::serve(int core) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "cardan-compute");
#endif
  if (core >= 0) keep_to(core);
  while (wait()) {
    const int64_t taken = work();
    if (taken == 0) continue;
    done_.fetch_add(taken);
    if (caller_asleep_.load()) {
      endings_.fetch_add(1);
      endings_.notify_one();
    }
  }
}

}  // namespace cardan_native

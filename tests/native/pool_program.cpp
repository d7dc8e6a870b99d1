// The thread pool by itself: each scenario is run by name, and ends with 0 where all went as it should.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/threads.h"

using cardan_native::Pool;

namespace {

void expect(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

// Every index is visited once, whatever the grain.
void visit(Pool& pool, int64_t count, int64_t grain) {
  std::vector<int> seen(static_cast<size_t>(count), 0);
  pool.parallel(count, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) ++seen[static_cast<size_t>(i)];
  });
  for (const int times : seen) expect(times == 1, "an index was visited never or twice");
}

void visit_all(Pool& pool) {
  for (const int64_t count : {1, 2, 3, 7, 64, 1000})
    for (const int64_t grain : {1, 2, 5, 1000}) visit(pool, count, grain);
}

void nap(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

void sizes() {
  Pool pool;
  for (const int threads : {1, 2, 3, 8, 1, 2}) {
    pool.resize(threads);
    expect(pool.threads() == threads, "the pool has another number of threads");
    visit_all(pool);
  }
}

void idle() {
  for (int round = 0; round < 20; ++round) {
    Pool pool;
    pool.resize(3, {round % 2 ? 0 : 50, false});
    if (round % 3) visit(pool, 100, 1);
    if (round % 4) nap(2);  // asleep by then
  }
  Pool never_used;
}

void sleepers() {
  Pool pool;
  pool.resize(4, {1, false});
  for (int round = 0; round < 200; ++round) {
    if (round % 10 == 0) nap(1);
    visit(pool, 1 + round % 9, 1);
  }
}

void two() {
  Pool first, second;
  first.resize(2);
  second.resize(3);
  std::thread other([&] {
    for (int round = 0; round < 200; ++round) visit(second, 50, 1);
  });
  for (int round = 0; round < 200; ++round) visit(first, 50, 1);
  other.join();
}

void callers() {
  Pool pool;
  pool.resize(2);
  std::vector<std::thread> all;
  for (int caller = 0; caller < 3; ++caller)
    all.emplace_back([&] {
      for (int round = 0; round < 200; ++round) visit(pool, 40, 1);
    });
  for (const int threads : {3, 1, 2}) pool.resize(threads);
  for (std::thread& caller : all) caller.join();
}

void throws(int threads) {
  Pool pool;
  pool.resize(threads);
  for (int round = 0; round < 100; ++round) {
    std::string caught;
    try {
      pool.parallel(64, 1, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i)
          if (i == round % 64) throw std::runtime_error("piece " + std::to_string(i));
      });
    } catch (const std::runtime_error& error) {
      caught = error.what();
    }
    expect(caught == "piece " + std::to_string(round % 64), "what a piece threw was not thrown again");
    visit(pool, 64, 1);
  }
}

void throwing() {
  throws(1);
  throws(3);
}

// Forks while another thread runs loops.
void forked() {
  Pool pool;
  pool.resize(3);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) visit(pool, 50, 1);
  });
  for (int round = 0; round < 20; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      expect(pool.threads() == 1, "a child has threads that nobody started");
      visit_all(pool);
      pool.resize(2);
      visit_all(pool);
      pool.resize(1);
      std::_Exit(7);
    }
    int status = 0;
    expect(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7, "the child failed");
  }
  stop = true;
  busy.join();
  visit_all(pool);
}

void pinned() {
  Pool pool;
  pool.resize(static_cast<int>(std::thread::hardware_concurrency()), {50, true});
  visit_all(pool);
  pool.resize(static_cast<int>(std::thread::hardware_concurrency()) + 1, {50, true});
  expect(!pool.pinned(), "more threads than cores were bound");
  visit_all(pool);
}

constexpr struct {
  const char* name;
  void (*run)();
} kScenarios[] = {{"sizes", sizes},       {"idle", idle},       {"sleepers", sleepers}, {"two", two},
                  {"callers", callers},   {"throwing", throwing}, {"forked", forked},   {"pinned", pinned}};

}  // namespace

int main(int count, char** names) {
  for (const auto& scenario : kScenarios)
    if (count == 2 && std::strcmp(scenario.name, names[1]) == 0) {
      scenario.run();
      return 0;
    }
  std::fprintf(stderr, "usage: pool_program SCENARIO\n");
  return 2;
}

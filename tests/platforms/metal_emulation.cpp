// Runs a Metal kernel body on host threads: one thread per lane, barriers where a SIMD group or threadgroup meets.
// It knows no kernel: shapes and constants come from generated lines that are included before and after.
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

typedef unsigned int uint;
struct uint3 {
    uint x, y, z;
};

namespace metal_host {
constexpr int LANES = 32;

struct Simd {
    std::barrier<> meet{LANES};
    float values[LANES];
};

struct Group {
    explicit Group(int simds) : meet(simds * LANES), simd(simds) {
        for (auto& one : simd) one = std::make_unique<Simd>();
    }
    std::barrier<> meet;
    std::vector<std::unique_ptr<Simd>> simd;
};

thread_local Group* group;
thread_local uint lane, part;
}  // namespace metal_host

inline float simd_sum(float value) {
    auto& simd = *metal_host::group->simd[metal_host::part];
    simd.values[metal_host::lane] = value;
    simd.meet.arrive_and_wait();
    float total = 0;
    for (float each : simd.values) total += each;
    simd.meet.arrive_and_wait();
    return total;
}

namespace mem_flags {
constexpr int mem_threadgroup = 0;
}
inline void threadgroup_barrier(int) { metal_host::group->meet.arrive_and_wait(); }

namespace precise {
inline float tanh(float x) { return std::tanh(x); }
}  // namespace precise
namespace fast {
inline float exp(float x) { return std::exp(x); }
}  // namespace fast
using std::max;

#define device
#define threadgroup static

#include "body.inc"

extern "C" void run(Inputs* in, float* out, int heads, int rows, int simds) {
    for (int row = 0; row < rows; ++row) {
        for (int head = 0; head < heads; ++head) {
            metal_host::Group group(simds);
            std::vector<std::thread> threads;
            for (int part = 0; part < simds; ++part) {
                for (int lane = 0; lane < metal_host::LANES; ++lane) {
                    threads.emplace_back([&, part, lane] {
                        metal_host::group = &group;
                        metal_host::lane = lane;
                        metal_host::part = part;
                        body(*in, out, lane, part, uint3{0u, uint(head), uint(row)});
                    });
                }
            }
            for (auto& thread : threads) thread.join();
        }
    }
}

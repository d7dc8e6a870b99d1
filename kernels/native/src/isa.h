// Which variants this processor, with this kernel, can run. Compiled for the baseline.
#pragma once

#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cardan_native {

#if defined(CARDAN_EMULATE)
inline bool has_avx2() { return true; }
inline bool has_avx512() { return true; }
inline bool has_amx() { return true; }
#elif defined(__x86_64__)
// Linux hands out the tile registers on request only (Documentation/arch/x86/xstate.rst); asking twice does no harm.
inline bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi2");
}

inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16");
}

inline bool has_amx() {
  unsigned a = 7, b = 0, c = 0, d = 0;
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25, kAvx512Fp16 = 1u << 23;
  constexpr unsigned kNeeded = kAmxBf16 | kAmxTile | kAmxInt8 | kAvx512Fp16;
  return has_avx512() && (d & kNeeded) == kNeeded && may_use_tiles();
}
#endif

// Names, the plainest first.
inline std::vector<std::string> runnable_variants() {
  std::vector<std::string> names = {"portable"};
#if defined(__x86_64__)
  if (has_avx2()) names.push_back("avx2");
  if (has_avx512()) names.push_back("avx512");
  if (has_amx()) names.push_back("amx");
#endif
  return names;
}

}  // namespace cardan_native

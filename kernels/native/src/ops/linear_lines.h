// Panels in registers: lines of 64 codes, and pairs of bfloat16.
#pragma once

#include "ops/packed.h"
#include "simd/dot.h"

namespace cardan_native {

inline constexpr int kPanelVectors = static_cast<int>(kPanel) / kLanes;

// Four consecutive inner elements of 16 output rows, one byte each.
struct Line {
  vw part[kPanelVectors];
};

// Line `step` (0 to 7) of a group.
template <Codes kCodes>
inline Line load_line(const uint8_t* group, int step) {
  Line line;
  for (int v = 0; v < kPanelVectors; ++v) {
    const uint8_t* column = group + v * kLanes * 4;
    if constexpr (kCodes == Codes::kByte) {
      line.part[v] = load_words(column + step * kLine);
    } else {
      const vw both = load_words(column + step % 4 * kLine);
      line.part[v] = (step < 4 ? both : both >> 4) & 0x0f0f;
      if constexpr (kCodes == Codes::kFive) {
        const vw plane = load_words(column + 4 * kLine);
        line.part[v] |= (step < 4 ? plane << (4 - step) : plane >> (step - 4)) & 0x1010;
      }
      if constexpr (kCodes == Codes::kSix) {
        const vw plane = load_words(column + (4 + step / 4) * kLine);
        const int at = step % 4 * 2;
        line.part[v] |= (at < 4 ? plane << (4 - at) : plane >> (at - 4)) & 0x3030;
      }
    }
  }
  return line;
}

inline void store_line(uint8_t* to, const Line& line) { std::memcpy(to, &line, sizeof line); }

struct PairOf {
  vf even, odd;
};

// kLanes pairs of bfloat16, widened.
inline PairOf load_pair(const bf16* from) {
  vu words;
  std::memcpy(&words, from, sizeof words);
  return {(vf)(words << 16), (vf)(words & 0xffff0000u)};
}

}  // namespace cardan_native

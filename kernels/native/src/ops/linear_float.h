// One or two rows of float activations times codes that are widened in registers.
#pragma once

#include "ops/linear_call.h"
#include "ops/linear_lines.h"

namespace cardan_native {

// The code of inner element 4 * step + byte of a group, for kLanes output rows from v * kLanes on.
template <Codes kCodes>
inline vi code_of(const uint8_t* group, int step, int byte, int v) {
  const auto words = [&](int line) {
    vu out;
    std::memcpy(&out, group + line * kLine + v * kLanes * 4, sizeof out);
    return out;
  };
  if constexpr (kCodes == Codes::kByte) {
    return (vi)(words(step) >> (8 * byte) & 255u);
  } else {
    vu code = words(step % 4) >> (8 * byte + step / 4 * 4) & 15u;
    if constexpr (kCodes == Codes::kFive) code |= (words(4) >> (8 * byte + step) & 1u) << 4;
    if constexpr (kCodes == Codes::kSix) code |= (words(4 + step / 4) >> (8 * byte + step % 4 * 2) & 3u) << 4;
    return (vi)code;
  }
}

void linear_float_grouped(const LinearCall& call, const FloatRows& x, Pool& pool);

}  // namespace cardan_native

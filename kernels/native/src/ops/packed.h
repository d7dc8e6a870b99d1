// Weights of linears as the kernels read them: panels of 16 output rows, side by side at every inner position.
//
// A panel is one run of memory, and a matrix is its panels in order, so that a product with few rows reads memory from
// front to back. Vector lanes are output rows: no sum over lanes is ever needed, and the rows that fill up the last
// panel are zeros that nobody reads. Layouts, in order of addresses:
//   kF32, kF16, kE4M3, kE5M2  [inner][16]
//   kBF16                     [inner / 2][16][2], pairs as multiplications of bfloat16 pairs want them, the last filled
//                             up with 0
//   kByte                     groups of 32 inner elements, each [8][16][4]: eight lines of 64 bytes; a line has four
//                             consecutive inner elements of 16 rows, as multiplications of four bytes want them
//   kNibble                   groups of four lines; line j has elements 4j .. 4j+3 in its low halves and those 16
//                             further on in its high halves
//   kFive                     as kNibble, then one line: bit s of its byte i is bit 4 of byte i of line s
//   kSix                      as kNibble, then two lines: bits 2(s % 4) and up of byte i of line s / 4 are bits 4 and 5
//                             of byte i of line s
// Scales, which kE4M3 may have too, lie apart, for each panel one run: for each scale group a row of 16 scales, then a
// row of 16 minimums where the format has them. kSuper has, for each 256 inner elements, 16 float16 (and 16 for
// minimums), then for each scale group 16 bytes that multiply them (and 16 for minimums).
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/storage.h"
#include "core/tensor.h"

namespace cardan_native {

inline constexpr int64_t kPanel = 16;       // output rows of a panel
inline constexpr int64_t kGroup = 32;       // inner elements that activations are quantized by
inline constexpr int64_t kSuperBlock = 256;  // inner elements that share a scale of scales
inline constexpr int64_t kLine = 64;        // bytes of a line

enum class Codes : uint8_t { kF32, kBF16, kF16, kE4M3, kE5M2, kNibble, kFive, kSix, kByte };
// What activations are rounded to before they are multiplied by a quantized weight, if at all: see `linear`.
enum class Activations : uint8_t { kFloat, kInt8, kInt16 };
enum class Scales : uint8_t { kNone, kF32, kBF16, kF16, kSuper };

// Numbers of rows of activations at which a linear changes from one kernel to another: see linear_choice.h.
struct Crossovers {
  int64_t few = 0, many = 0;
};

// The weight of an element is scale * (code - offset), or scale * code + minimum.
struct PackedLinear {
  int64_t rows = 0, columns = 0;  // output and inner features
  Codes codes = Codes::kF32;
  Scales scales = Scales::kNone;
  int64_t scale_group = 0;  // inner elements that share a scale
  int offset = 0;
  bool has_minimums = false;
  bool signed_scales = false;  // of kSuper: its bytes are signed
  Activations activations = Activations::kFloat;
  DType dtype = DType::kF32;  // of activations, and of rows gathered
  Crossovers crossovers;

  std::shared_ptr<Storage> memory;
  const uint8_t* code_data = nullptr;
  const uint8_t* scale_data = nullptr;
  int64_t code_bytes = 0, scale_bytes = 0;  // of one panel
  std::vector<float> bias;                  // empty, or one for each row of each panel

  bool grouped() const { return codes >= Codes::kNibble; }
  int64_t panels() const { return (rows + kPanel - 1) / kPanel; }
  // Inner elements that the kernels multiply by one scale: scale groups of more than 32 are taken 32 at a time.
  int64_t unit() const { return scale_group < kGroup ? scale_group : kGroup; }
  const uint8_t* panel_codes(int64_t panel) const { return code_data + panel * code_bytes; }
  const uint8_t* panel_scales(int64_t panel) const { return scale_data + panel * scale_bytes; }
  int64_t num_bytes() const { return panels() * (code_bytes + scale_bytes) + 4 * static_cast<int64_t>(bias.size()); }
};

// Bytes of one group of 32 inner elements of a panel; of one inner element for codes without groups.
constexpr int64_t group_bytes(Codes codes) {
  switch (codes) {
    case Codes::kNibble:
      return 4 * kLine;
    case Codes::kFive:
      return 5 * kLine;
    case Codes::kSix:
      return 6 * kLine;
    case Codes::kByte:
      return 8 * kLine;
    case Codes::kF32:
      return 4 * kPanel;
    case Codes::kBF16:
    case Codes::kF16:
      return 2 * kPanel;
    default:
      return kPanel;
  }
}

// One tensor of a checkpoint: rows one after the other, as the format has them.
struct RawRows {
  const uint8_t* data;
  int64_t bytes, rows;
};

struct PackRequest {
  std::string format;  // as `TensorView.dtype` has it
  std::vector<RawRows> parts;
  int64_t columns = 0;
  DType dtype = DType::kF32;
  Activations activations = Activations::kFloat;
  const Tensor* bias = nullptr;  // float32 [rows]
  std::map<std::string, int64_t> crossovers;  // under "KIND.few" and "KIND.many"
};

// Formats that `pack` takes.
std::vector<std::string> packable_formats();

// The rows of all parts, in order. F32 weights are rounded to a narrower type of activations; all others are exact.
// Throws std::invalid_argument for unknown formats, inner sizes that are no whole blocks, bytes that do not fit, and
// crossovers out of their bounds.
std::shared_ptr<const PackedLinear> pack(const PackRequest& request);

}  // namespace cardan_native

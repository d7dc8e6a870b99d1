#include "ops/linear_choice.h"

#include <stdexcept>

#include "ops/linear_call.h"
#include "ops/linear_float.h"
#include "simd/dot.h"

namespace cardan_native {
namespace {

constexpr int64_t kMostFew = 64;     // rows whose codes are worth taking apart anew each time
constexpr int64_t kMostMany = 1024;  // from so many on nothing beats a kernel for many

const char* name_of(Codes codes) {
  switch (codes) {
    case Codes::kF32:
      return "f32";
    case Codes::kBF16:
      return "bf16";
    case Codes::kF16:
      return "f16";
    case Codes::kE4M3:
      return "e4m3";
    case Codes::kE5M2:
      return "e5m2";
    case Codes::kNibble:
      return "nibble";
    case Codes::kFive:
      return "five";
    case Codes::kSix:
      return "six";
    default:
      return "byte";
  }
}

// A name covers weights that have no choice too, such as of bfloat16 with columns that fill no tile.
int64_t chosen(const std::string& name, CrossoverRange range, const std::map<std::string, int64_t>& given) {
  if (range.least == range.most) return range.usual;
  const auto found = given.find(name);
  if (found == given.end()) return range.usual;
  if (found->second < range.least || found->second > range.most)
    throw std::invalid_argument("pack_linear: crossover " + name + " must be between " + std::to_string(range.least) +
                                " and " + std::to_string(range.most) + ", got " + std::to_string(found->second));
  return found->second;
}

}  // namespace

std::string kind_of(const PackedLinear& weight) {
  const char* rounded = weight.activations == Activations::kInt8    ? "int8"
                        : weight.activations == Activations::kInt16 ? "int16"
                                                                    : "float";
  return std::string(name_of(weight.codes)) + "-" + rounded;
}

CrossoverRange few_range(const PackedLinear& weight) {
  if (weight.activations != Activations::kFloat) return {0, kMostFew, kDotFour ? 8 : 4};
  if (weight.grouped()) return {0, kFewGrouped, kFewGrouped};
  if (weight.codes == Codes::kE4M3 || weight.codes == Codes::kE5M2) return {};
  return {0, kFewDense, kFewDense};
}

CrossoverRange many_range(const PackedLinear& weight) {
  if (has_int16_pairs(weight)) return {1, kMostMany, kDotFour ? 33 : 5};
  if (has_bf16_tiles(weight)) return {1, kMostMany, 17};  // up to a tile's 16 rows, pairs keep up with memory
  return {};
}

Crossovers crossovers_of(const PackedLinear& weight, const std::map<std::string, int64_t>& given) {
  const std::string kind = kind_of(weight);
  return {chosen(kind + ".few", few_range(weight), given), chosen(kind + ".many", many_range(weight), given)};
}

}  // namespace cardan_native

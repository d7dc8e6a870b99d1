// Element types of tensors, and the bit patterns that stand for narrow floats.
//
// Source of the 8-bit floats: OCP 8-bit Floating Point Specification (OFP8), revision 1.0; e4m3 has no infinity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace cardan_native {

enum class DType : uint8_t { kF32, kBF16, kF16, kI32, kU8, kBool, kI8, kE4M3, kE5M2 };

// Bit patterns of narrow floats; simd/vec.h widens and rounds them.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
};

inline size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kU8:
    case DType::kBool:
    case DType::kI8:
    case DType::kE4M3:
    case DType::kE5M2:
      return 1;
  }
  return 0;
}

inline const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kI32:
      return "int32";
    case DType::kU8:
      return "uint8";
    case DType::kBool:
      return "bool";
    case DType::kI8:
      return "int8";
    case DType::kE4M3:
      return "fp8_e4m3";
    case DType::kE5M2:
      return "fp8_e5m2";
  }
  return "unknown";
}

inline DType dtype_of(const std::string& name) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kI32, DType::kU8, DType::kBool, DType::kI8,
                      DType::kE4M3, DType::kE5M2})
    if (name == name_of(dtype)) return dtype;
  throw std::invalid_argument(
      "dtype must be float32, bfloat16, float16, int32, uint8, bool, int8, fp8_e4m3 or fp8_e5m2, got '" + name + "'");
}

// Calls body with a value of the C++ type of a float dtype, so that one template serves all three.
template <class Body>
decltype(auto) with_float(DType dtype, const char* op, Body&& body) {
  switch (dtype) {
    case DType::kF32:
      return body(float{});
    case DType::kBF16:
      return body(bf16{});
    case DType::kF16:
      return body(f16{});
    default:
      throw std::invalid_argument(std::string(op) + " takes float32, bfloat16 or float16, got " + name_of(dtype));
  }
}

}  // namespace cardan_native

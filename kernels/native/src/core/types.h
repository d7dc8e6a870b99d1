// Element types of tensors, and the bit patterns that stand for narrow floats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace cardan_native {

enum class DType : uint8_t { kF32, kBF16, kF16, kI32, kU8, kBool };

// Bit patterns of narrow floats; simd/vec.h widens and rounds them.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
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
  }
  return "unknown";
}

inline DType dtype_of(const std::string& name) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kI32, DType::kU8, DType::kBool})
    if (name == name_of(dtype)) return dtype;
  throw std::invalid_argument("dtype must be float32, bfloat16, float16, int32, uint8 or bool, got '" + name + "'");
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

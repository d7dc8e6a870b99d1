// Formats of checkpoints: how their blocks become codes and scales. Layouts are those that Cardan's
// `cardan.quantization.formats` describes; GGUF's come from its specification.
#pragma once

#include <cstdint>
#include <string>

#include "ops/packed.h"

namespace cardan_native {

// A block taken apart.
struct Block {
  uint8_t codes[kSuperBlock];
  uint32_t scale = 0, minimum = 0;  // bits, of the format's scale type; of a super block's, float16
  uint8_t scale_codes[16], minimum_codes[16];
};

struct Format {
  const char* name;
  int elements, bytes;  // of a block
  Codes codes;
  Scales scales = Scales::kNone;
  int scale_group = 0;
  bool has_minimums = false;
  int offset = 0;
  bool signed_scales = false;
  void (*take_apart)(const uint8_t* block, const Format& format, Block& out) = nullptr;  // null for dense formats
};

// The format of that name, or null.
const Format* find_format(const std::string& name);

// Every format, for lists and messages.
const Format* all_formats(size_t& count);

}  // namespace cardan_native

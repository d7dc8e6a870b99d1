// Tile registers: how they are set up. Which shapes they have is the kernels' business.
//
// Setting up and loading are opaque to the compiler, which may otherwise drop or move the stores that they read:
// `tiles_see_memory` stands before them.
#pragma once

#include <cstdint>
#include <initializer_list>

#if defined(__AMX_TILE__)
#include <immintrin.h>
#endif

namespace cardan_native {

inline constexpr int64_t kTileRows = 16;   // rows of a full tile
inline constexpr int64_t kTileBytes = 64;  // of a row of a full tile

#if defined(__AMX_TILE__)

inline void tiles_see_memory() { __asm__ volatile("" ::: "memory"); }

// One for as long as tiles are used: sets them up, and gives them back. The shape of tile i is the i-th given.
class TileScope {
 public:
  struct Shape {
    int64_t rows, bytes;
  };

  explicit TileScope(std::initializer_list<Shape> shapes) {
    int tile = 0;
    for (const Shape& shape : shapes) {
      config_.rows[tile] = static_cast<uint8_t>(shape.rows);
      config_.bytes[tile++] = static_cast<uint16_t>(shape.bytes);
    }
    tiles_see_memory();
    _tile_loadconfig(&config_);
  }
  ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  // As the instruction reads it: Intel's manual, volume 1, chapter 18, "Programming with Intel AMX".
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };
  static_assert(sizeof(Config) == 64);

  Config config_;
};

#endif

}  // namespace cardan_native

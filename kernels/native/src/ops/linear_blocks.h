// Products with many rows, cut up: rows into tiles whose sums fit the registers, tiles and panels into tasks.
//
// The activations of a tile lie one inner element (or four) after the other, its rows side by side, so that a kernel
// reads one run of memory. Codes of a panel are widened for a piece of the inner elements, which stays in the
// first-level cache while all tiles of a task pass by; these stay in the second-level cache while the task's panels
// pass by.
#pragma once

#include <algorithm>

#include "ops/linear_call.h"

namespace cardan_native {

// Tiles differ by a row at most: a small one at the end would keep no multiplier busy.
struct Tiles {
  int64_t rows, count;

  Tiles(int64_t rows, int64_t most) : rows(rows), count((rows + most - 1) / most) {}
  int64_t first(int64_t tile) const { return tile * rows / count; }  // row; that of `count` is the end
  int64_t height(int64_t tile) const { return first(tile + 1) - first(tile); }
};

inline constexpr int64_t kBlockRows = 256, kBlockPanels = 4;  // of a task at most
inline constexpr int64_t kBlockTasks = 12;  // wanted for each thread, so that none waits long for the last
inline constexpr int64_t kInnerStep = 128;  // pieces are multiples of it, as scales want it, or end with the row

// Some panels, and the rows of some tiles.
struct Block {
  int64_t panel, panels, tile, tiles, row, rows;
};

// Inner elements of a piece, of which there may be `most`, a multiple of kInnerStep.
inline int64_t inner_piece(int64_t columns, int64_t most) {
  const int64_t pieces = (columns + most - 1) / most;
  return (columns / pieces + kInnerStep - 1) / kInnerStep * kInnerStep;
}

// body(block), whose blocks have at most kBlockRows rows.
template <class Body>
void for_each_tile_block(const Tiles& tiles, int64_t panels, Pool& pool, const Body& body) {
  const int64_t height = (tiles.rows + tiles.count - 1) / tiles.count, most = std::max<int64_t>(1, kBlockRows / height);
  const int64_t blocks = (tiles.count + most - 1) / most;
  int64_t each = kBlockPanels;
  const auto groups = [&] { return (panels + each - 1) / each; };
  while (each > 1 && groups() * blocks < kBlockTasks * pool.threads()) --each;
  const int64_t count = groups();
  pool.parallel(count * blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t block = task / count, panel = task % count * each;
      const int64_t tile = block * tiles.count / blocks, end = (block + 1) * tiles.count / blocks;
      const int64_t row = tiles.first(tile);
      body(Block{panel, std::min(each, panels - panel), tile, end - tile, row, tiles.first(end) - row});
    }
  });
}

// body(tile) for all of them, which makes their rows ready.
template <class Body>
void for_each_tile(const Tiles& tiles, int64_t width, Pool& pool, const Body& body) {
  for_each_row(tiles.count, tiles.rows * width / tiles.count, pool, body);
}

}  // namespace cardan_native

// How elementwise work is cut up: long rows into pieces, many short rows together.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/threads.h"

namespace cardan_native {

inline constexpr int64_t kPieceElements = 8192;  // some microseconds of work: less would be lost in waking threads

// Rows of `width` elements that make up a piece.
inline int64_t rows_per_piece(int64_t width) {
  return std::max<int64_t>(1, kPieceElements / std::max<int64_t>(1, width));
}

// Calls body(row, first_column, columns) for all of [rows, width]; a call covers part of one row.
template <class Body>
void for_pieces(Pool& pool, int64_t rows, int64_t width, const Body& body) {
  if (width <= 0) return;
  const int64_t per_row = (width + kPieceElements - 1) / kPieceElements;
  pool.parallel(rows * per_row, rows_per_piece(width), [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece) {
      const int64_t row = piece / per_row, start = piece % per_row * kPieceElements;
      body(row, start, std::min(kPieceElements, width - start));
    }
  });
}

}  // namespace cardan_native

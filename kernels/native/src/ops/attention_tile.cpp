// Attention of a tile of one row's queries over all of its keys, a block of them at a time.
//
// A block of keys and values is gathered by slot and widened once into panels, which all queries of the tile and all
// query heads of the key head then pass over by one multiplication kernel with its results in registers.

#include <iterator>

#include "ops/attention_lanes.h"
#include "ops/attention_schedule.h"

namespace cardan_native {
namespace {

constexpr int64_t kBlockKeys = 64;
constexpr int kPanel = 2 * kLanes;  // columns of a panel
#if defined(__AVX512F__)
constexpr int kMostRows = 12;  // rows at once: twice as many sums, a column pair and one value fill the registers
#else
constexpr int kMostRows = 6;
#endif

int64_t panels_of(int64_t columns) { return (columns + kPanel - 1) / kPanel; }

// Rows and the panel of one multiplication.
struct Factors {
  const float* rows;  // [rows, depth]
  int64_t row_stride;
  const float* panel;  // [depth, kPanel]
  int64_t depth;
};

// out[row] = out[row] * scales[row] + rows[row] x panel; without scales out[row] counts as 0.
template <int Rows, bool Scaled>
void multiply_rows(const Factors& by, const float* scales, float* out, int64_t out_stride) {
  vf left[Rows], right[Rows];
  for (int row = 0; row < Rows; ++row) {
    if constexpr (Scaled) {
      const vf scale = splat(scales[row]);
      left[row] = load(out + row * out_stride) * scale;
      right[row] = load(out + row * out_stride + kLanes) * scale;
    } else {
      left[row] = right[row] = splat(0.0f);
    }
  }
  const float *values = by.rows, *panel = by.panel;
  for (int64_t step = 0; step < by.depth; ++step, panel += kPanel) {
    const vf first = load(panel), second = load(panel + kLanes);
    for (int row = 0; row < Rows; ++row) {
      const vf value = splat(values[row * by.row_stride + step]);
      left[row] = fused(value, first, left[row]);
      right[row] = fused(value, second, right[row]);
    }
  }
  for (int row = 0; row < Rows; ++row) {
    store(out + row * out_stride, left[row]);
    store(out + row * out_stride + kLanes, right[row]);
  }
}

template <bool Scaled, int Rows = kMostRows>
void multiply_few(int64_t count, const Factors& by, const float* scales, float* out, int64_t out_stride) {
  if constexpr (Rows > 0) {
    if (count == Rows)
      multiply_rows<Rows, Scaled>(by, scales, out, out_stride);
    else
      multiply_few<Scaled, Rows - 1>(count, by, scales, out, out_stride);
  }
}

template <bool Scaled>
void multiply(int64_t count, Factors by, const float* scales, float* out, int64_t out_stride) {
  for (int64_t row = 0; row < count; row += kMostRows) {
    multiply_few<Scaled>(std::min<int64_t>(kMostRows, count - row), by, Scaled ? scales + row : nullptr,
                         out + row * out_stride, out_stride);
    by.rows += kMostRows * by.row_stride;
  }
}

// Keys of a block as panels [k_dim, kPanel]: each key is a column. Columns behind the last key are 0.
template <class T>
void gather_keys(const T* base, int64_t stride, const int32_t* slots, int64_t count, int64_t dim, float* panels) {
  vf square[kLanes];
  for (int64_t first = 0; first < panels_of(count) * kPanel; first += kLanes) {
    float* to = panels + first / kPanel * dim * kPanel + first % kPanel;
    const int64_t there = std::clamp<int64_t>(count - first, 0, kLanes);
    const T* keys[kLanes];
    for (int i = 0; i < kLanes; ++i) keys[i] = base + (i < there ? slots[first + i] * stride : 0);
    int64_t column = 0;
    for (; column + kLanes <= dim; column += kLanes) {
      for (int i = 0; i < kLanes; ++i) square[i] = i < there ? load(keys[i] + column) : splat(0.0f);
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(to + (column + i) * kPanel, square[i]);
    }
    for (; column < dim; ++column)
      for (int i = 0; i < kLanes; ++i) to[column * kPanel + i] = i < there ? widen(keys[i][column]) : 0.0f;
  }
}

// Values of a block as panels [kBlockKeys, kPanel] of their columns; columns behind the last one are 0.
template <class T>
void gather_values(const T* base, int64_t stride, const int32_t* slots, int64_t count, int64_t dim, float* panels) {
  for (int64_t key = 0; key < count; ++key) {
    const T* from = base + slots[key] * stride;
    for (int64_t column = 0; column < panels_of(dim) * kPanel; column += kLanes) {
      float* to = panels + (column / kPanel * kBlockKeys + key) * kPanel + column % kPanel;
      if (column + kLanes <= dim)
        store(to, load(from + column));
      else
        store(to, column < dim ? load_part(from + column, static_cast<int>(dim - column)) : splat(0.0f));
    }
  }
}

// What a tile keeps while it passes over its keys. Query rows are tokens times heads, heads innermost.
struct Tile {
  int64_t queries, v_width;
  float *q, *scores, *values, *largest, *sums, *scales;  // values: [queries, v_width]
  float *key_panels, *value_panels;

  Tile(const AttentionStep& step, int64_t count, AttentionScratch& scratch)
      : queries(count), v_width(panels_of(step.v_dim) * kPanel) {
    const auto size = AttentionScratch::padded;
    const int64_t wanted[] = {size(count * step.k_dim), size(count * kBlockKeys), size(count * v_width), size(count),
                              size(count), size(count), kBlockKeys * step.k_dim, kBlockKeys * v_width};
    float** parts[] = {&q, &scores, &values, &largest, &sums, &scales, &key_panels, &value_panels};
    int64_t all = 0;
    for (const int64_t floats : wanted) all += floats;
    float* next = scratch.need(all);
    for (size_t i = 0; i < std::size(wanted); next += wanted[i++]) *parts[i] = next;
    std::fill(values, values + count * v_width, 0.0f);
    std::fill(largest, largest + count, -INFINITY);
    std::fill(sums, sums + count, 0.0f);
  }
};

// Keys [first, last) of a row, at most kBlockKeys, and the queries of a tile that see any of them.
struct Block {
  int64_t first, last;
  int64_t first_token, last_token;  // of the tile
};

// Scores become weights, and what a query has gathered so far gets its factor.
void weigh_block(const AttentionStep& step, Tile& tile, const Block& block, int64_t first_position) {
  const int64_t count = block.last - block.first;
  for (int64_t token = block.first_token; token < block.last_token; ++token) {
    const int64_t position = first_position + token;
    const int64_t last = std::clamp<int64_t>(position + 1 - block.first, 0, count);
    const int64_t first = std::clamp<int64_t>(step.first_key(position) - block.first, 0, last);
    for (int64_t query = token * step.shared; query < (token + 1) * step.shared; ++query) {
      float* scores = tile.scores + query * kBlockKeys;
      const float before = tile.largest[query];
      const float found = prepare_scores(scores, whole_vectors(count), first, last, step.softcap);
      const float largest = found > before ? found : before;
      const float sum = exponentiate(scores, whole_vectors(count), largest);
      const float scale = largest == before ? 1.0f : exp(splat(before - largest))[0];
      tile.scales[query] = scale;
      tile.sums[query] = tile.sums[query] * scale + sum;
      tile.largest[query] = largest;
    }
  }
}

template <class T>
void attend_block(const AttentionStep& step, Tile& tile, const Block& block, const int32_t* row_slots,
                  int64_t kv_head, int64_t first_position) {
  const int64_t count = block.last - block.first;
  const int32_t* slots = row_slots + block.first;
  gather_keys(reinterpret_cast<const T*>(step.keys) + kv_head * step.k_dim, step.key_stride(), slots, count, step.k_dim,
              tile.key_panels);
  gather_values(reinterpret_cast<const T*>(step.values) + kv_head * step.v_dim, step.value_stride(), slots, count,
                step.v_dim, tile.value_panels);
  const int64_t first = block.first_token * step.shared;
  const int64_t queries = (block.last_token - block.first_token) * step.shared;
  for (int64_t panel = 0; panel < panels_of(count); ++panel)
    multiply<false>(queries,
                    {tile.q + first * step.k_dim, step.k_dim, tile.key_panels + panel * step.k_dim * kPanel, step.k_dim},
                    nullptr, tile.scores + first * kBlockKeys + panel * kPanel, kBlockKeys);
  weigh_block(step, tile, block, first_position);
  for (int64_t panel = 0; panel < tile.v_width / kPanel; ++panel)
    multiply<true>(queries,
                   {tile.scores + first * kBlockKeys, kBlockKeys, tile.value_panels + panel * kBlockKeys * kPanel, count},
                   tile.scales + first, tile.values + first * tile.v_width + panel * kPanel, tile.v_width);
}

template <class T>
void attend(const AttentionStep& step, const ScheduledRow& row, const AttentionTask& task) {
  thread_local AttentionScratch scratch;
  const int64_t tokens = task.last - task.first;
  Tile tile(step, tokens * step.shared, scratch);
  for (int64_t query = 0; query < tile.queries; ++query)
    read_query(step, row.first_token + task.first + query / step.shared,
               task.kv_head * step.shared + query % step.shared, tile.q + query * step.k_dim, step.k_dim);
  const int64_t first_position = row.position(task.first), behind = first_position + tokens;
  const int64_t first_key = step.first_key(first_position);
  for (int64_t start = first_key / kBlockKeys * kBlockKeys; start < behind; start += kBlockKeys) {
    Block block{std::max(start, first_key), std::min(start + kBlockKeys, behind), 0, tokens};
    block.first_token = std::max<int64_t>(0, block.first - first_position);
    if (step.window) block.last_token = std::min(tokens, block.last + step.window - 1 - first_position);
    attend_block<T>(step, tile, block, row.slots, task.kv_head, first_position);
  }
  for (int64_t query = 0; query < tile.queries; ++query)
    write_result(step, row.first_token + task.first + query / step.shared,
                 task.kv_head * step.shared + query % step.shared,
                 {tile.largest[query], tile.sums[query], tile.values + query * tile.v_width});
}

}  // namespace

void attend_tile(const AttentionStep& step, const AttentionSchedule& schedule, const AttentionTask& task) {
  with_float(step.kv_dtype, "attention", [&]<class T>(T) { attend<T>(step, schedule.rows[task.index], task); });
}

}  // namespace cardan_native

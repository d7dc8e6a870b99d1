// Attention of a tile of one row's queries over all of its keys, a block of them at a time.
//
// A block of keys and values is gathered by slot and widened once into panels, which all queries of the tile and all
// query heads of the key head then pass over by one multiplication kernel with its results in registers.

#include <iterator>

#include "ops/attention_block.h"

namespace cardan_native {
namespace {

constexpr int kPanel = 2 * kLanes;  // columns of a panel
#if defined(__AVX512F__)
constexpr int kMostRows = 12;  // rows at once: twice as many sums, a column pair and one value fill the registers
#else
constexpr int kMostRows = 6;
#endif

int64_t panels_of(int64_t columns) { return (columns + kPanel - 1) / kPanel; }

// out[row] = out[row] * scales[row] + rows[row] x panel, of kPanel columns; without scales out[row] counts as 0.
struct Product {
  const float* rows;  // [rows, depth]
  int64_t row_stride;
  const float* panel;  // [depth, kPanel]
  int64_t depth;       // 1 or more
  float* out;
  int64_t out_stride;
  const float* scales;
};

template <int Rows, bool Scaled>
void multiply_rows(const Product& by) {
  vf left[Rows], right[Rows];
  for (int row = 0; row < Rows; ++row) {
    const vf scale = splat(Scaled ? by.scales[row] : 0.0f);
    left[row] = Scaled ? load(by.out + row * by.out_stride) * scale : scale;
    right[row] = Scaled ? load(by.out + row * by.out_stride + kLanes) * scale : scale;
  }
  const float *values = by.rows, *panel = by.panel, *behind = values + by.depth;
  do {  // a loop that might not run at all would have the sums in memory
    const vf first = load(panel), second = load(panel + kLanes);
    panel += kPanel;
    for (int row = 0; row < Rows; ++row) {
      const vf value = splat(values[row * by.row_stride]);
      left[row] = fused(value, first, left[row]);
      right[row] = fused(value, second, right[row]);
    }
  } while (++values != behind);
  for (int row = 0; row < Rows; ++row) {
    store(by.out + row * by.out_stride, left[row]);
    store(by.out + row * by.out_stride + kLanes, right[row]);
  }
}

template <bool Scaled, int Rows = kMostRows>
void multiply_few(const Product& by, int64_t count) {
  if constexpr (Rows > 0) {
    if (count == Rows)
      multiply_rows<Rows, Scaled>(by);
    else
      multiply_few<Scaled, Rows - 1>(by, count);
  }
}

// All of `count` rows; each step asks for `ahead_rows` of what comes next.
template <bool Scaled>
void multiply(Product by, int64_t count, Ahead& ahead, int64_t ahead_rows) {
  for (; count > 0; count -= kMostRows) {
    ahead.next(ahead_rows);
    multiply_few<Scaled>(by, std::min<int64_t>(kMostRows, count));
    by.rows += kMostRows * by.row_stride;
    by.out += kMostRows * by.out_stride;
    if constexpr (Scaled) by.scales += kMostRows;
  }
}

// Keys or values of one head, at the slots of a block; `scales` are those of the head.
template <class T>
struct Gathered {
  const T* base;
  int64_t stride;
  const int32_t* slots;
  int64_t count;
  const float* scales;
  int64_t scale_stride;

  const T* at(int64_t key) const { return base + slots[key] * stride; }
  float scale(int64_t key) const { return kScaled<T> ? scales[slots[key] * scale_stride] : 1.0f; }
};

template <class T>
vf scaled(vf x, float scale) {
  return kScaled<T> ? x * scale : x;
}

// Keys of a block as panels [k_dim, kPanel]: each key is a column. Columns behind the last key are 0.
template <class T>
void gather_keys(const Gathered<T>& from, int64_t dim, float* panels) {
  const int64_t count = from.count;
  vf square[kLanes];
  for (int64_t first = 0; first < panels_of(count) * kPanel; first += kLanes) {
    float* to = panels + first / kPanel * dim * kPanel + first % kPanel;
    const int64_t there = std::clamp<int64_t>(count - first, 0, kLanes);
    const T* keys[kLanes];
    float scales[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      keys[i] = i < there ? from.at(first + i) : nullptr;
      scales[i] = i < there ? from.scale(first + i) : 0.0f;
    }
    int64_t column = 0;
    for (; column + kLanes <= dim; column += kLanes) {
      for (int i = 0; i < kLanes; ++i)
        square[i] = i < there ? scaled<T>(load(keys[i] + column), scales[i]) : splat(0.0f);
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(to + (column + i) * kPanel, square[i]);
    }
    for (; column < dim; ++column)
      for (int i = 0; i < kLanes; ++i)
        to[column * kPanel + i] = i < there ? widen(keys[i][column]) * (kScaled<T> ? scales[i] : 1.0f) : 0.0f;
  }
}

// Values of a block as panels [kBlockKeys, kPanel] of their columns; columns behind the last one are 0.
template <class T>
void gather_values(const Gathered<T>& values, int64_t dim, float* panels) {
  for (int64_t key = 0; key < values.count; ++key) {
    const T* from = values.at(key);
    const float scale = values.scale(key);
    for (int64_t column = 0; column < panels_of(dim) * kPanel; column += kLanes) {
      float* to = panels + (column / kPanel * kBlockKeys + key) * kPanel + column % kPanel;
      if (column + kLanes <= dim)
        store(to, scaled<T>(load(from + column), scale));
      else
        store(to, column < dim ? scaled<T>(load_part(from + column, static_cast<int>(dim - column)), scale)
                               : splat(0.0f));
    }
  }
}

// What a tile keeps while it passes over its keys.
struct Tile {
  int64_t queries, v_width;
  TileState state;
  float *q, *values;  // values: [queries, v_width]
  float *key_panels, *value_panels;

  Tile(const AttentionStep& step, int64_t count, AttentionScratch& scratch)
      : queries(count), v_width(panels_of(step.v_dim) * kPanel) {
    const auto size = AttentionScratch::padded;
    const int64_t wanted[] = {size(count * step.k_dim), size(count * kBlockKeys), size(count * v_width), size(count),
                              size(count), size(count), kBlockKeys * step.k_dim, kBlockKeys * v_width};
    float** parts[] = {&q, &state.scores, &values, &state.largest, &state.sums, &state.scales, &key_panels,
                       &value_panels};
    int64_t all = 0;
    for (const int64_t floats : wanted) all += floats;
    float* next = scratch.need(all);
    for (size_t i = 0; i < std::size(wanted); next += wanted[i++]) *parts[i] = next;
    std::fill(values, values + count * v_width, 0.0f);
    state.clear(count);
  }
};

template <class T>
void attend_block(const AttentionStep& step, const Tile& tile, const KeyBlock& block, int64_t kv_head) {
  const int64_t count = block.count(), first = block.first_query(step), queries = block.queries(step);
  const T* keys = reinterpret_cast<const T*>(step.keys) + kv_head * step.k_dim;
  const T* values = reinterpret_cast<const T*>(step.values) + kv_head * step.v_dim;
  const int64_t size = static_cast<int64_t>(sizeof(T));
  const int64_t ahead_rows = count / std::max<int64_t>(1, panels_of(count) * queries / kMostRows) + 1;

  const float* scales = step.scales_of(step.key_scales, kv_head);
  gather_keys<T>({keys, step.key_stride(), block.slots, count, scales, step.kv_heads}, step.k_dim, tile.key_panels);
  Ahead ahead(reinterpret_cast<const char*>(values), step.value_stride() * size, step.v_dim * size, block.slots, count);
  for (int64_t panel = 0; panel < panels_of(count); ++panel)
    multiply<false>({tile.q + first * step.k_dim, step.k_dim, tile.key_panels + panel * step.k_dim * kPanel, step.k_dim,
                     tile.state.scores + first * kBlockKeys + panel * kPanel, kBlockKeys, nullptr},
                    queries, ahead, ahead_rows);
  weigh_block(step, tile.state, block);
  scales = step.scales_of(step.value_scales, kv_head);
  gather_values<T>({values, step.value_stride(), block.slots, count, scales, step.kv_heads}, step.v_dim,
                   tile.value_panels);
  ahead = Ahead(reinterpret_cast<const char*>(keys), step.key_stride() * size, step.k_dim * size, block.slots + count,
                block.next_keys);
  for (int64_t panel = 0; panel < tile.v_width / kPanel; ++panel)
    multiply<true>({tile.state.scores + first * kBlockKeys, kBlockKeys,
                    tile.value_panels + panel * kBlockKeys * kPanel, count,
                    tile.values + first * tile.v_width + panel * kPanel, tile.v_width, tile.state.scales + first},
                   queries, ahead, ahead_rows);
}

template <class T>
void attend(const AttentionStep& step, const ScheduledRow& row, const AttentionTask& task) {
  thread_local AttentionScratch scratch;
  const int64_t tokens = task.last - task.first;
  const Tile tile(step, tokens * step.shared, scratch);
  for (int64_t query = 0; query < tile.queries; ++query)
    read_query(step, row.first_token + task.first + query / step.shared,
               task.first_head * step.shared + query % step.shared, tile.q + query * step.k_dim, step.k_dim);
  for_each_key_block(step, row, task,
                     [&](const KeyBlock& block) { attend_block<T>(step, tile, block, task.first_head); });
  write_tile(step, row, task, tile.state, tile.values, tile.v_width);
}

}  // namespace

void attend_tile(const AttentionStep& step, const AttentionSchedule& schedule, const AttentionTask& task) {
  if (takes_bf16_pairs(step)) return attend_bf16_tile(step, schedule, task);
  with_stored(step.kv_dtype, "attention", [&]<class T>(T) { attend<T>(step, schedule.rows[task.index], task); });
}

}  // namespace cardan_native

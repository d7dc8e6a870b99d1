// Attention of a tile of bfloat16 queries over bfloat16 keys and values by instructions that multiply pairs of these, or
// tiles of pairs: products are exact and sums float32, with numbers below the smallest normal one taken for 0. Scores
// stay in float32; a query's weights of keys are rounded to bfloat16 before values are weighed by them.
//
// A tile, in a register where there are such, holds 16 rows of 64 bytes: of queries or weights 16 of them by 32 columns,
// of keys or values 16 pairs of rows by 16 columns, each pair side by side as the product wants it.

#include <cstring>
#include <iterator>

#include "ops/attention_block.h"
#include "ops/linear_tiles.h"
#include "ops/pair_products.h"

namespace cardan_native {

#if defined(__AVX512BF16__)

namespace {

constexpr int64_t kColumns = 16;               // of sums in a tile
constexpr int64_t kDepth = 32;                 // rows of keys or values that a tile takes, in pairs
constexpr int64_t kTileWords = 256;            // of four bytes in a tile
constexpr int64_t kKeyTiles = kBlockKeys / kColumns;
constexpr int64_t kKeySteps = kBlockKeys / kDepth;
static_assert(kLanes == kColumns);

int64_t padded_to(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// What a tile of queries keeps. Tile registers are read whole: behind the last query there are as many more as one of
// them holds, which count as nothing. Those of values take in what fills no register.
struct Bf16Tile {
  int64_t queries, k_width, v_width;
  TileState state;
  float* values;        // [queries, v_width]
  bf16 *q, *weights;    // [queries, k_width], [queries, kBlockKeys]
  float *keys, *below;  // tiles, as words: [kKeyTiles][k_width / kDepth], and of values [v_width / kColumns][kKeySteps]

  Bf16Tile(const AttentionStep& step, int64_t count, AttentionScratch& scratch)
      : queries(count), k_width(padded_to(step.k_dim, kDepth)), v_width(padded_to(step.v_dim, kColumns)) {
    const auto size = AttentionScratch::padded;
    const int64_t rows = count + kTileRows;
    float *q_words = nullptr, *weight_words = nullptr;
    const int64_t wanted[] = {size(rows * kBlockKeys), size(rows), size(rows), size(rows), size(rows * v_width),
                              size(rows * k_width / 2), size(rows * kBlockKeys / 2), kBlockKeys * k_width / 2,
                              kBlockKeys * v_width / 2};
    float** parts[] = {&state.scores, &state.largest, &state.sums, &state.scales, &values, &q_words, &weight_words,
                       &keys, &below};
    int64_t all = 0;
    for (const int64_t floats : wanted) all += floats;
    float* next = scratch.need(all);
    for (size_t i = 0; i < std::size(wanted); next += wanted[i++]) *parts[i] = next;
    q = reinterpret_cast<bf16*>(q_words);
    weights = reinterpret_cast<bf16*>(weight_words);
    std::fill(values, values + rows * v_width, 0.0f);
    std::fill(q_words, q_words + rows * k_width / 2, 0.0f);
    std::fill(weight_words, weight_words + rows * kBlockKeys / 2, 0.0f);
    state.clear(count);
  }

  float* spare() const { return values + queries * v_width; }  // [kTileRows, v_width]
};

void read_queries(const AttentionStep& step, const ScheduledRow& row, const AttentionTask& task, const Bf16Tile& tile) {
  const auto* q = reinterpret_cast<const bf16*>(step.q);
  for (int64_t query = 0; query < tile.queries; ++query) {
    const int64_t token = row.first_token + task.first + query / step.shared;
    const int64_t head = task.first_head * step.shared + query % step.shared;
    std::memcpy(static_cast<void*>(tile.q + query * tile.k_width),
                q + token * step.q_token_stride + head * step.q_head_stride, static_cast<size_t>(step.k_dim) * 2);
  }
}

// 32 columns of a key as 16 words, each a pair; those behind `there` are 0.
vf pairs_of(const bf16* key, int64_t there) {
  alignas(64) bf16 buffer[kDepth] = {};
  if (there < kDepth) {
    if (there > 0) std::memcpy(static_cast<void*>(buffer), key, static_cast<size_t>(there) * 2);
    key = buffer;
  }
  vf words;
  std::memcpy(&words, key, sizeof words);
  return words;
}

// Keys of a block: each is a column of a tile, and its features go in pairs down the rows.
void gather_key_tiles(const AttentionStep& step, const KeyBlock& block, int64_t kv_head, const Bf16Tile& tile) {
  const auto* keys = reinterpret_cast<const bf16*>(step.keys) + kv_head * step.k_dim;
  float* to = tile.keys;
  vf square[kColumns];
  for (int64_t first = 0; first < block.count(); first += kColumns)
    for (int64_t column = 0; column < tile.k_width; column += kDepth, to += kTileWords) {
      for (int64_t i = 0; i < kColumns; ++i) {
        const bool there = first + i < block.count();
        square[i] = there ? pairs_of(keys + block.slots[first + i] * step.key_stride() + column, step.k_dim - column)
                          : splat(0.0f);
      }
      transpose(square);
      for (int64_t i = 0; i < kColumns; ++i) store(to + i * kColumns, square[i]);
    }
}

// Values of a block: two keys go side by side in each row of a tile.
void gather_value_tiles(const AttentionStep& step, const KeyBlock& block, int64_t kv_head, const Bf16Tile& tile) {
  const auto* values = reinterpret_cast<const bf16*>(step.values) + kv_head * step.v_dim;
  const auto wide = [&](int64_t key, int64_t column) -> vu {
    if (key >= block.count()) return vu{};
    const bf16* from = values + block.slots[key] * step.value_stride() + column;
    const int64_t there = step.v_dim - column;
    return (vu)(there >= kColumns ? load(from) : load_part(from, static_cast<int>(there)));
  };
  for (int64_t column = 0; column < tile.v_width; column += kColumns)
    for (int64_t pair = 0; pair < kBlockKeys / 2; ++pair) {
      const vu first = wide(2 * pair, column), second = wide(2 * pair + 1, column);
      store(tile.below + column * kBlockKeys / 2 + pair * kColumns, (vf)((first >> 16) | second));
    }
}

// Weights in bfloat16, 0 for keys that are not there.
void round_weights(const Bf16Tile& tile, int64_t first, int64_t queries, int64_t count) {
  for (int64_t query = first; query < first + queries; ++query)
    for (int64_t key = 0; key < kBlockKeys; key += kLanes)
      store(tile.weights + query * kBlockKeys + key,
            key < count ? load(tile.state.scores + query * kBlockKeys + key) : splat(0.0f));
}

#if defined(__AMX_BF16__)

// Scores of 16 queries and all keys of the block.
void score(const Bf16Tile& tile, const bf16* q, float* scores) {
  const int64_t steps = tile.k_width / kDepth;
  const float* keys = tile.keys;
  tiles_see_memory();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < steps; ++i, keys += kTileWords, q += kDepth) {
    _tile_loadd(4, q, tile.k_width * 2);
    _tile_loadd(5, keys, kTileBytes);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, keys + steps * kTileWords, kTileBytes);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(5, keys + 2 * steps * kTileWords, kTileBytes);
    _tile_dpbf16ps(2, 4, 5);
    _tile_loadd(6, keys + 3 * steps * kTileWords, kTileBytes);
    _tile_dpbf16ps(3, 4, 6);
  }
  _tile_stored(0, scores, kBlockKeys * 4);
  _tile_stored(1, scores + kColumns, kBlockKeys * 4);
  _tile_stored(2, scores + 2 * kColumns, kBlockKeys * 4);
  _tile_stored(3, scores + 3 * kColumns, kBlockKeys * 4);
  tiles_see_memory();
}

// Adds to what 16 queries have gathered the block's values, weighed.
void gather(const Bf16Tile& tile, const bf16* weights, float* values) {
  const float* below = tile.below;
  tiles_see_memory();
  _tile_loadd(4, weights, kBlockKeys * 2);
  _tile_loadd(5, weights + kDepth, kBlockKeys * 2);
  for (int64_t column = 0; column < tile.v_width; column += kColumns, below += kKeySteps * kTileWords) {
    _tile_loadd(0, values + column, tile.v_width * 4);
    _tile_loadd(6, below, kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, below + kTileWords, kTileBytes);
    _tile_dpbf16ps(0, 5, 7);
    _tile_stored(0, values + column, tile.v_width * 4);
  }
  tiles_see_memory();
}

// As `gather` for the fewer than 16 queries that are left: those behind them see nothing of the block, and a weight of 0
// is not nothing, as 0 times infinity is NaN.
void gather_last(const Bf16Tile& tile, const bf16* weights, int64_t queries, float* values) {
  const auto bytes = static_cast<size_t>(queries * tile.v_width) * sizeof(float);
  std::memcpy(tile.spare(), values, bytes);
  gather(tile, weights, tile.spare());
  std::memcpy(values, tile.spare(), bytes);
}

void scale_values(const Bf16Tile& tile, int64_t first, int64_t queries) {
  for (int64_t query = first; query < first + queries; ++query) {
    const float scale = tile.state.scales[query];
    if (scale == 1.0f) continue;
    float* values = tile.values + query * tile.v_width;
    for (int64_t column = 0; column < tile.v_width; column += kLanes)
      store(values + column, load(values + column) * scale);
  }
}

void score_all(const AttentionStep& step, const Bf16Tile& tile, const KeyBlock&, int64_t first, int64_t queries) {
  for (int64_t query = first; query < first + queries; query += kTileRows)
    score(tile, tile.q + query * tile.k_width, tile.state.scores + query * kBlockKeys);
  float* scores = tile.state.scores + first * kBlockKeys;
  for (int64_t i = 0; i < queries * kBlockKeys; i += kLanes) store(scores + i, load(scores + i) * step.scale);
}

void gather_all(const Bf16Tile& tile, const KeyBlock&, int64_t first, int64_t queries) {
  scale_values(tile, first, queries);
  for (int64_t query = first; query < first + queries; query += kTileRows) {
    const bf16* weights = tile.weights + query * kBlockKeys;
    float* values = tile.values + query * tile.v_width;
    const int64_t left = first + queries - query;
    left < kTileRows ? gather_last(tile, weights, left, values) : gather(tile, weights, values);
  }
}

TileScope tiles_for_attention() {
  return TileScope{{kTileRows, kTileBytes}, {kTileRows, kTileBytes}, {kTileRows, kTileBytes}, {kTileRows, kTileBytes},
                   {kTileRows, kTileBytes}, {kTileRows, kTileBytes}, {kTileRows, kTileBytes}, {kTileRows, kTileBytes}};
}

#else

void score_all(const AttentionStep& step, const Bf16Tile& tile, const KeyBlock& block, int64_t first, int64_t queries) {
  const int64_t pairs = tile.k_width / 2;
  const PairProduct product{tile.q + first * tile.k_width, tile.k_width, tile.keys, pairs * kColumns, pairs,
                            tile.state.scores + first * kBlockKeys, kBlockKeys, nullptr, step.scale};
  multiply_pairs<false>(product, padded_to(block.count(), kColumns) / kColumns, queries);
}

void gather_all(const Bf16Tile& tile, const KeyBlock& block, int64_t first, int64_t queries) {
  const PairProduct product{tile.weights + first * kBlockKeys, kBlockKeys, tile.below, kBlockKeys / 2 * kColumns,
                            (block.count() + 1) / 2, tile.values + first * tile.v_width, tile.v_width,
                            tile.state.scales + first, 1.0f};
  multiply_pairs<true>(product, tile.v_width / kColumns, queries);
}

struct NoTiles {};

NoTiles tiles_for_attention() { return {}; }

#endif

void attend_block(const AttentionStep& step, const Bf16Tile& tile, const KeyBlock& block, int64_t kv_head) {
  const int64_t first = block.first_query(step), queries = block.queries(step);
  gather_key_tiles(step, block, kv_head, tile);
  score_all(step, tile, block, first, queries);
  weigh_block(step, tile.state, block);
  round_weights(tile, first, queries, block.count());
  gather_value_tiles(step, block, kv_head, tile);
  gather_all(tile, block, first, queries);
}

}  // namespace

bool takes_bf16_pairs(const AttentionStep& step) {
  return step.dtype == DType::kBF16 && step.kv_dtype == DType::kBF16;
}

void attend_bf16_tile(const AttentionStep& step, const AttentionSchedule& schedule, const AttentionTask& task) {
  thread_local AttentionScratch scratch;
  const ScheduledRow& row = schedule.rows[task.index];
  const Bf16Tile tile(step, (task.last - task.first) * step.shared, scratch);
  [[maybe_unused]] const auto scope = tiles_for_attention();
  read_queries(step, row, task, tile);
  for_each_key_block(step, row, task,
                     [&](const KeyBlock& block) { attend_block(step, tile, block, task.first_head); });
  write_tile(step, row, task, tile.state, tile.values, tile.v_width);
}

#else

bool takes_bf16_pairs(const AttentionStep&) { return false; }

void attend_bf16_tile(const AttentionStep&, const AttentionSchedule&, const AttentionTask&) {}

#endif

}  // namespace cardan_native

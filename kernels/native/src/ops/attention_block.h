// What the kernels of a tile share, whatever they multiply with: the blocks of keys that its queries pass over, and the
// softmax between a block's two products.
#pragma once

#include "ops/attention_lanes.h"
#include "ops/attention_schedule.h"

namespace cardan_native {

inline constexpr int64_t kBlockKeys = 64;

// Of each query of a tile; queries are tokens times heads, heads innermost.
struct TileState {
  float* scores;  // [queries, kBlockKeys], which become weights
  float *largest, *sums;
  float* scales;  // what the values that a query has gathered are multiplied by before those of the block are added

  void clear(int64_t queries) const {
    std::fill(largest, largest + queries, -INFINITY);
    std::fill(sums, sums + queries, 0.0f);
  }
};

// Keys [first, last) of a row, at most kBlockKeys, and the queries of a tile that see any of them.
struct KeyBlock {
  int64_t first, last;
  int64_t first_token, last_token;  // of the tile
  int64_t first_position;           // of the tile
  const int32_t* slots;             // of the keys
  int64_t next_keys;                // in the block after this one

  int64_t count() const { return last - first; }
  int64_t first_query(const AttentionStep& step) const { return first_token * step.shared; }
  int64_t queries(const AttentionStep& step) const { return (last_token - first_token) * step.shared; }
};

// Calls body with each block of keys that a tile sees, in order.
template <class Body>
void for_each_key_block(const AttentionStep& step, const ScheduledRow& row, const AttentionTask& task, Body&& body) {
  const int64_t tokens = task.last - task.first;
  const int64_t first_position = row.position(task.first), behind = first_position + tokens;
  const int64_t first_key = step.first_key(first_position);
  for (int64_t start = first_key / kBlockKeys * kBlockKeys; start < behind; start += kBlockKeys) {
    KeyBlock block{};
    block.first = std::max(start, first_key);
    block.last = std::min(start + kBlockKeys, behind);
    block.first_token = std::max<int64_t>(0, block.first - first_position);
    block.last_token = step.window ? std::min(tokens, block.last + step.window - 1 - first_position) : tokens;
    block.first_position = first_position;
    block.slots = row.slots + block.first;
    block.next_keys = std::min(kBlockKeys, behind - block.last);
    body(block);
  }
}

// Scores become weights, and what a query has gathered so far gets its factor.
inline void weigh_block(const AttentionStep& step, const TileState& tile, const KeyBlock& block) {
  const int64_t count = block.count();
  for (int64_t token = block.first_token; token < block.last_token; ++token) {
    const int64_t position = block.first_position + token;
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

// Writes the results of a tile whose queries have gathered `values: [queries, stride]`.
inline void write_tile(const AttentionStep& step, const ScheduledRow& row, const AttentionTask& task,
                       const TileState& tile, const float* values, int64_t stride) {
  for (int64_t query = 0; query < (task.last - task.first) * step.shared; ++query)
    write_result(step, row.first_token + task.first + query / step.shared,
                 task.first_head * step.shared + query % step.shared,
                 {tile.largest[query], tile.sums[query], values + query * stride});
}

}  // namespace cardan_native

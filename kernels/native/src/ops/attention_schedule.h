// Cuts one call of attention into tasks that threads take one by one.
//
// Rows with few queries (decode, drafts to verify) are split along their keys, at multiples of kSplitKeys positions,
// and their parts merged; rows with many are cut into tiles of queries. How a row is cut depends on that row only, so
// that its result does not depend on its batch mates nor on the number of threads. Split rows whose tables agree over a
// whole split share its task, which reads the keys once for all of them and gives each what it would get alone.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/attention_step.h"

namespace cardan_native {

inline constexpr int64_t kSplitKeys = 256;

struct ScheduledRow : AttentionRow {
  int64_t first_split = 0, num_splits = 0;  // 0 for rows in tiles
  int64_t partials = 0;                     // where the parts of a row of several splits start, in floats

  int64_t queries(const AttentionStep& step) const { return count * step.shared; }  // of one key head
};

struct AttentionTask {
  bool tile;
  int32_t index;                  // tile: the row; split: which split
  int32_t first, last;            // tile: tokens of the row; split: entries of `members`
  int32_t first_head, last_head;  // key heads; one for a tile
};

struct AttentionMerge {
  int32_t row, kv_head;
};

class AttentionSchedule {
 public:
  // Reads the lengths of the step as they are now. How many key heads a split takes at once, side by side in memory,
  // depends on `threads`; what it computes for each does not.
  void build(const AttentionStep& step, int threads);

  std::vector<ScheduledRow> rows;
  std::vector<int32_t> members;  // rows of splits
  std::vector<AttentionTask> tasks;
  std::vector<AttentionMerge> merges;
  int64_t partial_floats = 0;
  int64_t products = 0;  // multiplications of all tasks, roughly

  // Where a row's part of a split stands for a key head: for each query its largest score and its sum, then the values.
  int64_t partial(const AttentionStep& step, const ScheduledRow& row, int64_t split, int64_t kv_head) const {
    return row.partials + ((split - row.first_split) * step.kv_heads + kv_head) * partial_size(step, row);
  }
  static int64_t partial_width(const AttentionStep& step) { return AttentionScratch::padded(step.v_dim + 2); }
  static int64_t partial_size(const AttentionStep& step, const ScheduledRow& row) {
    return row.queries(step) * partial_width(step);
  }

 private:
  void add_row(const AttentionStep& step, int64_t row);
  void add_tiles(const AttentionStep& step, int32_t row);
  void add_splits(const AttentionStep& step, int32_t first, int32_t last, int64_t split);
  void add_shared_split(const AttentionStep& step, int32_t first, int32_t last, int64_t split);
  void add_own_splits(const AttentionStep& step, int32_t place, int64_t first_split);
  void add_split(const AttentionStep& step, int32_t first, int32_t last, int64_t split);
  bool sees_whole(const ScheduledRow& row, int64_t split) const;

  int64_t heads_at_once_ = 1;
};

// Tokens of a row that one tile takes.
int64_t tile_tokens(const AttentionStep& step);

// The kernels of the two kinds of tasks, and of merges.
void attend_split(const AttentionStep& step, const AttentionSchedule& schedule, const AttentionTask& task,
                  float* partials);
void attend_tile(const AttentionStep& step, const AttentionSchedule& schedule, const AttentionTask& task);
// Likewise for bfloat16 queries over bfloat16 keys, on processors that multiply pairs of these.
bool takes_bf16_pairs(const AttentionStep& step);
void attend_bf16_tile(const AttentionStep& step, const AttentionSchedule& schedule, const AttentionTask& task);
void merge_splits(const AttentionStep& step, const AttentionSchedule& schedule, const AttentionMerge& merge,
                  const float* partials);

}  // namespace cardan_native

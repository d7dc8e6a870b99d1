#include "ops/attention_schedule.h"

#include <cstring>

namespace cardan_native {
namespace {

constexpr int64_t kSplitQueries = 16;   // rows of at most so many queries to a key head are split along their keys
constexpr int64_t kSharedQueries = 48;  // a shared split takes about so many queries of a key head at once
constexpr int64_t kQueriesAtOnce = 64;  // of all key heads of a task
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kTileQueries = 96;

// A row's lengths as the plan holds them, cut to what there is memory for.
AttentionRow read_row(const AttentionStep& step, int64_t row) {
  AttentionRow out;
  const int64_t start = std::clamp<int64_t>(step.query_starts[row], 0, step.tokens);
  const int64_t stop = std::clamp<int64_t>(step.query_starts[row + 1], start, step.tokens);
  out.first_token = start;
  out.count = stop - start;
  const int64_t id = step.row_ids[row];
  if (id >= 0 && id < step.table_rows) {
    out.slots = step.table + id * step.max_length;
    out.length = std::min<int64_t>(step.seq_lens[row], step.max_length);
  }
  return out;
}

}  // namespace

int64_t tile_tokens(const AttentionStep& step) { return std::max<int64_t>(1, kTileQueries / step.shared); }

void AttentionSchedule::build(const AttentionStep& step, int threads) {
  rows.clear();
  members.clear();
  tasks.clear();
  merges.clear();
  partial_floats = products = 0;
  int64_t behind = 0, splits = 0;
  for (int64_t row = 0; row < step.rows; ++row) {
    add_row(step, row);
    behind = std::max(behind, rows.back().first_token + rows.back().count);
    splits += rows.back().num_splits;
  }
  write_zeros(step, behind, step.tokens - behind);
  const int64_t wanted = threads * kTasksPerThread;
  const int64_t head_tasks = std::clamp<int64_t>((wanted + splits) / std::max<int64_t>(splits, 1), 1, step.kv_heads);
  heads_at_once_ = threads == 1 ? step.kv_heads : (step.kv_heads + head_tasks - 1) / head_tasks;
  if (step.window || members.size() < 2)
    for (int32_t place = 0; place < static_cast<int32_t>(members.size()); ++place)
      add_own_splits(step, place, rows[members[place]].first_split);
  else
    add_splits(step, 0, static_cast<int32_t>(members.size()), 0);
}

void AttentionSchedule::add_row(const AttentionStep& step, int64_t index) {
  ScheduledRow row{read_row(step, index)};
  rows.push_back(row);
  if (row.count == 0) return;
  if (row.length < row.count) {
    write_zeros(step, row.first_token, row.count);
    rows.back().count = 0;
    return;
  }
  const int64_t queries = row.queries(step), seen = row.length - step.first_key(row.position(0));
  products += queries * seen * (step.k_dim + step.v_dim) * step.kv_heads;
  if (row.count > 1 && queries > kSplitQueries) {
    add_tiles(step, static_cast<int32_t>(index));
    return;
  }
  members.push_back(static_cast<int32_t>(index));
  ScheduledRow& added = rows.back();
  added.first_split = step.first_key(row.position(0)) / kSplitKeys;
  added.num_splits = (row.length - 1) / kSplitKeys + 1 - added.first_split;
  if (added.num_splits == 1) return;
  added.partials = partial_floats;
  partial_floats += added.num_splits * step.kv_heads * partial_size(step, added);
  for (int32_t head = 0; head < step.kv_heads; ++head) merges.push_back({static_cast<int32_t>(index), head});
}

// The last tiles see the most keys; they come first, so that no thread is left with one of them at the end.
void AttentionSchedule::add_tiles(const AttentionStep& step, int32_t index) {
  const int64_t size = tile_tokens(step), count = rows[index].count;
  for (int64_t tile = (count - 1) / size; tile >= 0; --tile)
    for (int32_t head = 0; head < step.kv_heads; ++head)
      tasks.push_back({true, index, static_cast<int32_t>(tile * size),
                       static_cast<int32_t>(std::min(count, (tile + 1) * size)), head, head + 1});
}

// Whether all queries of a row see all keys of a split.
bool AttentionSchedule::sees_whole(const ScheduledRow& row, int64_t split) const {
  return row.position(0) + 1 >= (split + 1) * kSplitKeys;
}

// Splits from `split` on of members [first, last), whose tables agree before it. Deeper splits come first: they put the
// members in their final order, by which tasks name them.
void AttentionSchedule::add_splits(const AttentionStep& step, int32_t first, int32_t last, int64_t split) {
  while (first < last) {
    const ScheduledRow& leader = rows[members[first]];
    int32_t middle = first + 1;
    if (sees_whole(leader, split)) {
      const int32_t* slots = leader.slots + split * kSplitKeys;
      for (int32_t place = middle; place < last; ++place) {
        const ScheduledRow& other = rows[members[place]];
        if (sees_whole(other, split) &&
            std::memcmp(slots, other.slots + split * kSplitKeys, kSplitKeys * sizeof(int32_t)) == 0)
          std::swap(members[place], members[middle++]);
      }
    }
    if (middle == first + 1) {
      add_own_splits(step, first, split);
    } else {
      add_splits(step, first, middle, split + 1);
      add_shared_split(step, first, middle, split);
    }
    first = middle;
  }
}

// One split of members that all read the same keys, some of them at a time.
void AttentionSchedule::add_shared_split(const AttentionStep& step, int32_t first, int32_t last, int64_t split) {
  int64_t queries = 0;
  for (int32_t place = first; place < last; ++place) {
    const int64_t more = rows[members[place]].queries(step);
    if (queries && queries + more > kSharedQueries) {
      add_split(step, first, place, split);
      first = place;
      queries = 0;
    }
    queries += more;
  }
  add_split(step, first, last, split);
}

void AttentionSchedule::add_own_splits(const AttentionStep& step, int32_t place, int64_t first_split) {
  const ScheduledRow& row = rows[members[place]];
  for (int64_t split = first_split; split < row.first_split + row.num_splits; ++split)
    add_split(step, place, place + 1, split);
}

void AttentionSchedule::add_split(const AttentionStep& step, int32_t first, int32_t last, int64_t split) {
  int64_t queries = 0;
  for (int32_t place = first; place < last; ++place) queries += rows[members[place]].queries(step);
  const int64_t heads = std::min(heads_at_once_, std::max<int64_t>(1, kQueriesAtOnce / queries));
  for (int64_t head = 0; head < step.kv_heads; head += heads)
    tasks.push_back({false, static_cast<int32_t>(split), first, last, static_cast<int32_t>(head),
                     static_cast<int32_t>(std::min(head + heads, step.kv_heads))});
}

}  // namespace cardan_native

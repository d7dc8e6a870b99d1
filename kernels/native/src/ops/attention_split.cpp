// Attention of a few queries over one split of keys, which are read where they lie.

#include <vector>

#include "ops/attention_lanes.h"
#include "ops/attention_schedule.h"

namespace cardan_native {
namespace {

constexpr int64_t kChunkKeys = 32;  // keys that stay in the first cache while all queries of a task pass over them

// One query row of a task: a token of a member and one of the heads that share the key head.
struct Query {
  const ScheduledRow* row;
  int64_t token;  // of the row
  int64_t head;
};

// Keys or values of one head, at the slots of a split.
template <class T>
struct Slotted {
  const T* base;
  int64_t stride;
  const int32_t* slots;

  const T* at(int64_t key) const { return base + slots[key] * stride; }
};

// Products of `Queries` queries, `width` apart, with `Count` keys; a query's results lie kSplitKeys apart. Each product
// is summed in the same order, whatever it is computed with.
template <class T, int Queries, int Count>
inline void products_of(const float* queries, int64_t width, const T* const* keys, int64_t dim, float* out) {
  Vectors<Count> sums[Queries] = {};
  int64_t column = 0;
  for (; column + kLanes <= dim; column += kLanes) {
    vf key[Count];
    for (int i = 0; i < Count; ++i) key[i] = load(keys[i] + column);
    for (int query = 0; query < Queries; ++query) {
      const vf x = load(queries + query * width + column);
      for (int i = 0; i < Count; ++i) sums[query].at[i] = fused(x, key[i], sums[query].at[i]);
    }
  }
  if (column < dim) {
    for (int i = 0; i < Count; ++i) {
      const vf key = load_part(keys[i] + column, static_cast<int>(dim - column));
      for (int query = 0; query < Queries; ++query)
        sums[query].at[i] = fused(load(queries + query * width + column), key, sums[query].at[i]);
    }
  }
  for (int query = 0; query < Queries; ++query) {
    const vf totals = sums_of<Count>(sums[query]);
    std::memcpy(out + query * kSplitKeys, &totals, Count * sizeof(float));
  }
}

// Scores of keys [first, last). The last keys of a split may be too few; then one is taken more than once, and what is
// written behind `last` means nothing.
template <class T, int Queries>
void score_keys(const float* queries, int64_t width, const Slotted<T>& keys, int64_t dim, int64_t first, int64_t last,
                float* scores) {
  constexpr int kCount = Queries == 1 ? std::min(8, kLanes) : 4;
  for (int64_t key = first; key < last; key += kCount) {
    const T* at[kCount];
    for (int i = 0; i < kCount; ++i) at[i] = keys.at(std::min(key + i, last - 1));
    products_of<T, Queries, kCount>(queries, width, at, dim, scores + key);
  }
}

template <class T>
void score(const float* queries, int64_t count, int64_t width, const Slotted<T>& keys, int64_t dim, int64_t num_keys,
           float* scores) {
  for (int64_t first = 0; first < num_keys; first += kChunkKeys) {
    const int64_t last = std::min(first + kChunkKeys, num_keys);
    int64_t query = 0;
    for (; query + 3 <= count; query += 3)
      score_keys<T, 3>(queries + query * width, width, keys, dim, first, last, scores + query * kSplitKeys);
    if (count - query == 2)
      score_keys<T, 2>(queries + query * width, width, keys, dim, first, last, scores + query * kSplitKeys);
    else if (count - query == 1)
      score_keys<T, 1>(queries + query * width, width, keys, dim, first, last, scores + query * kSplitKeys);
  }
}

// Columns of the weighed values of `Queries` queries, `Count` vectors of them or `part` columns of one.
template <class T, int Queries, int Count, bool Part = false>
inline void weigh_columns(const float* weights, const Slotted<T>& values, int64_t num_keys, int part, float* out,
                          int64_t width) {
  Vectors<Count> sums[Queries] = {};
  for (int64_t key = 0; key < num_keys; ++key) {
    const T* value = values.at(key);
    vf x[Count];
    for (int i = 0; i < Count; ++i) {
      if constexpr (Part)
        x[i] = load_part(value, part);
      else
        x[i] = load(value + i * kLanes);
    }
    for (int query = 0; query < Queries; ++query) {
      const vf weight = splat(weights[query * kSplitKeys + key]);
      for (int i = 0; i < Count; ++i) sums[query].at[i] = fused(weight, x[i], sums[query].at[i]);
    }
  }
  for (int query = 0; query < Queries; ++query)
    for (int i = 0; i < Count; ++i) store(out + query * width + i * kLanes, sums[query].at[i]);
}

template <class T, int Queries>
void weigh_values(const float* weights, Slotted<T> values, int64_t dim, int64_t num_keys, float* out, int64_t width) {
  constexpr int kMost = Queries == 1 ? 8 : 4;
  const T* base = values.base;
  int64_t column = 0;
  const auto pass = [&]<int Count>(std::integral_constant<int, Count>) {
    for (; column + Count * kLanes <= dim; column += Count * kLanes) {
      values.base = base + column;
      weigh_columns<T, Queries, Count>(weights, values, num_keys, 0, out + column, width);
    }
  };
  pass(std::integral_constant<int, kMost>());
  pass(std::integral_constant<int, 2>());
  pass(std::integral_constant<int, 1>());
  values.base = base + column;
  if (column < dim)
    weigh_columns<T, Queries, 1, true>(weights, values, num_keys, static_cast<int>(dim - column), out + column, width);
}

template <class T>
void weigh(const float* weights, int64_t count, const Slotted<T>& values, int64_t dim, int64_t num_keys, float* out,
           int64_t width) {
  int64_t query = 0;
  for (; query + 3 <= count; query += 3)
    weigh_values<T, 3>(weights + query * kSplitKeys, values, dim, num_keys, out + query * width, width);
  if (count - query == 2)
    weigh_values<T, 2>(weights + query * kSplitKeys, values, dim, num_keys, out + query * width, width);
  else if (count - query == 1)
    weigh_values<T, 1>(weights + query * kSplitKeys, values, dim, num_keys, out + query * width, width);
}

// The keys of a split that a task reads: all that any of its queries sees.
struct Range {
  int64_t first, last;  // positions
};

Range keys_of(const AttentionStep& step, const ScheduledRow& row, int64_t split) {
  return {std::max(split * kSplitKeys, step.first_key(row.position(0))),
          std::min((split + 1) * kSplitKeys, row.length)};
}

void put(const AttentionStep& step, const AttentionSchedule& schedule, const AttentionTask& task, const Query& query,
         const AttentionState& state, float* partials) {
  if (query.row->num_splits == 1) {
    write_result(step, query.row->first_token + query.token, query.head, state);
    return;
  }
  const int64_t place = query.token * step.shared + query.head % step.shared;
  float* to = partials + schedule.partial(step, *query.row, task.index, task.kv_head) +
              place * AttentionSchedule::partial_width(step);
  to[0] = state.largest;
  to[1] = state.sum;
  std::memcpy(to + 2, state.values, static_cast<size_t>(step.v_dim) * sizeof(float));
}

template <class T>
void attend(const AttentionStep& step, const AttentionSchedule& schedule, const AttentionTask& task, float* partials) {
  thread_local AttentionScratch scratch;
  thread_local std::vector<Query> queries;
  queries.clear();
  for (int32_t place = task.first; place < task.last; ++place) {
    const ScheduledRow& row = schedule.rows[schedule.members[place]];
    for (int64_t token = 0; token < row.count; ++token)
      for (int64_t head = 0; head < step.shared; ++head)
        queries.push_back({&row, token, task.kv_head * step.shared + head});
  }
  const int64_t count = static_cast<int64_t>(queries.size());
  const int64_t q_width = whole_vectors(step.k_dim), v_width = whole_vectors(step.v_dim);
  float* q = scratch.need(count * (AttentionScratch::padded(q_width) + kSplitKeys + AttentionScratch::padded(v_width)));
  float* scores = q + count * AttentionScratch::padded(q_width);
  float* sums = scores + count * kSplitKeys;
  for (int64_t i = 0; i < count; ++i)
    read_query(step, queries[i].row->first_token + queries[i].token, queries[i].head, q + i * q_width, q_width);

  const ScheduledRow& leader = *queries[0].row;
  const Range range = keys_of(step, leader, task.index);
  const int64_t num_keys = range.last - range.first;
  const int32_t* slots = leader.slots + range.first;
  const Slotted<T> keys{reinterpret_cast<const T*>(step.keys) + task.kv_head * step.k_dim, step.key_stride(), slots};
  const Slotted<T> values{reinterpret_cast<const T*>(step.values) + task.kv_head * step.v_dim, step.value_stride(),
                          slots};
  score(q, count, q_width, keys, step.k_dim, num_keys, scores);
  thread_local std::vector<AttentionState> states;
  states.resize(queries.size());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = queries[i].row->position(queries[i].token);
    const int64_t last = std::clamp<int64_t>(position + 1 - range.first, 0, num_keys);
    const int64_t first = std::clamp<int64_t>(step.first_key(position) - range.first, 0, last);
    float* row = scores + i * kSplitKeys;
    const float largest = prepare_scores(row, whole_vectors(num_keys), first, last, step.softcap);
    states[i] = {largest, exponentiate(row, whole_vectors(num_keys), largest), sums + i * v_width};
  }
  weigh(scores, count, values, step.v_dim, num_keys, sums, v_width);
  for (int64_t i = 0; i < count; ++i) put(step, schedule, task, queries[i], states[i], partials);
}

}  // namespace

void attend_split(const AttentionStep& step, const AttentionSchedule& schedule, const AttentionTask& task,
                  float* partials) {
  with_float(step.kv_dtype, "attention", [&]<class T>(T) { attend<T>(step, schedule, task, partials); });
}

// The parts of a row, in order.
void merge_splits(const AttentionStep& step, const AttentionSchedule& schedule, const AttentionMerge& merge,
                  const float* partials) {
  thread_local AttentionScratch scratch;
  float* values = scratch.need(AttentionScratch::padded(step.v_dim));
  const ScheduledRow& row = schedule.rows[merge.row];
  const int64_t last_split = row.first_split + row.num_splits;
  for (int64_t query = 0; query < row.queries(step); ++query) {
    const auto part = [&](int64_t split) {
      return partials + schedule.partial(step, row, split, merge.kv_head) +
             query * AttentionSchedule::partial_width(step);
    };
    float largest = -INFINITY, sum = 0.0f;
    for (int64_t split = row.first_split; split < last_split; ++split)
      largest = part(split)[0] > largest ? part(split)[0] : largest;
    const float offset = largest == -INFINITY ? 0.0f : largest;
    std::fill(values, values + step.v_dim, 0.0f);
    for (int64_t split = row.first_split; split < last_split; ++split) {
      const float* from = part(split);
      const float factor = exp(splat(from[0] - offset))[0];
      sum += from[1] * factor;
      for (int64_t column = 0; column < step.v_dim; ++column) values[column] += from[2 + column] * factor;
    }
    write_result(step, row.first_token + query / step.shared, merge.kv_head * step.shared + query % step.shared,
                 {largest, sum, values});
  }
}

}  // namespace cardan_native

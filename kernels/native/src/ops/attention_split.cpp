// Attention of a few queries over one split of keys, which are read where they lie.

#include <cstring>
#include <vector>

#include "ops/attention_lanes.h"
#include "ops/attention_schedule.h"

namespace cardan_native {
namespace {

constexpr int64_t kChunkKeys = 16;  // keys that stay in the first cache while all queries of a task pass over them

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
  Slotted shifted(int64_t columns) const { return {base + columns, stride, slots}; }
};

// Products of `Queries` queries, `width` apart, with `Count` keys; a query's results lie kSplitKeys apart. Each product
// is summed in the same order, whatever it is computed with.
template <class T, int Queries, int Count>
inline void products_of(const float* queries, int64_t width, const T* const* keys, int64_t dim, float* out) {
  Vectors<Count> sums[Queries];
  for (auto& sum : sums)
    for (vf& one : sum.at) one = splat(0.0f);
  int64_t column = 0;
  const int64_t whole = dim / kLanes * kLanes;
  if (whole > 0) {
    do {
      vf key[Count];
      for (int i = 0; i < Count; ++i) key[i] = load(keys[i] + column);
      for (int query = 0; query < Queries; ++query) {
        const vf x = load(queries + query * width + column);
        for (int i = 0; i < Count; ++i) sums[query].at[i] = fused(x, key[i], sums[query].at[i]);
      }
      column += kLanes;
    } while (column != whole);
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

// All queries of one key head, with keys [first, last) of a split.
template <class T>
void score(const float* queries, int64_t count, int64_t width, const Slotted<T>& keys, int64_t dim, int64_t first,
           int64_t last, float* scores) {
  int64_t query = 0;
  for (; query + 3 <= count; query += 3)
    score_keys<T, 3>(queries + query * width, width, keys, dim, first, last, scores + query * kSplitKeys);
  if (count - query == 2)
    score_keys<T, 2>(queries + query * width, width, keys, dim, first, last, scores + query * kSplitKeys);
  else if (count - query == 1)
    score_keys<T, 1>(queries + query * width, width, keys, dim, first, last, scores + query * kSplitKeys);
}

// Adds the values of keys [first, last) to `Count` vectors of columns, or to `part` columns of one, of `Queries`
// queries whose sums lie `width` apart.
template <class T, int Queries, int Count, bool Part = false>
inline void weigh_columns(const float* weights, const Slotted<T>& values, int64_t first, int64_t last, int part,
                          float* out, int64_t width) {
  Vectors<Count> sums[Queries];
  for (int query = 0; query < Queries; ++query)
    for (int i = 0; i < Count; ++i) sums[query].at[i] = load(out + query * width + i * kLanes);
  int64_t key = first;
  do {  // a loop that might not run at all would have the sums in memory
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
  } while (++key != last);
  for (int query = 0; query < Queries; ++query)
    for (int i = 0; i < Count; ++i) store(out + query * width + i * kLanes, sums[query].at[i]);
}

template <class T, int Queries>
void weigh_values(const float* weights, Slotted<T> values, int64_t dim, int64_t first, int64_t last, float* out,
                  int64_t width) {
  const T* base = values.base;
  int64_t column = 0;
  const auto pass = [&]<int Count>(std::integral_constant<int, Count>) {
    for (; column + Count * kLanes <= dim; column += Count * kLanes) {
      values.base = base + column;
      weigh_columns<T, Queries, Count>(weights, values, first, last, 0, out + column, width);
    }
  };
  pass(std::integral_constant<int, Queries == 1 ? 8 : 4>());
  pass(std::integral_constant<int, 2>());
  pass(std::integral_constant<int, 1>());
  values.base = base + column;
  if (column < dim)
    weigh_columns<T, Queries, 1, true>(weights, values, first, last, static_cast<int>(dim - column), out + column,
                                       width);
}

template <class T>
void weigh(const float* weights, int64_t count, const Slotted<T>& values, int64_t dim, int64_t first, int64_t last,
           float* out, int64_t width) {
  int64_t query = 0;
  for (; query + 3 <= count; query += 3)
    weigh_values<T, 3>(weights + query * kSplitKeys, values, dim, first, last, out + query * width, width);
  if (count - query == 2)
    weigh_values<T, 2>(weights + query * kSplitKeys, values, dim, first, last, out + query * width, width);
  else if (count - query == 1)
    weigh_values<T, 1>(weights + query * kSplitKeys, values, dim, first, last, out + query * width, width);
}

// The keys of a split that a task reads: all that any of its queries sees.
struct Range {
  int64_t first, last;  // positions
};

Range keys_of(const AttentionStep& step, const ScheduledRow& row, int64_t split) {
  return {std::max(split * kSplitKeys, step.first_key(row.position(0))),
          std::min((split + 1) * kSplitKeys, row.length)};
}

void put(const AttentionStep& step, const AttentionSchedule& schedule, int64_t split, const Query& query,
         const AttentionState& state, float* partials) {
  if (query.row->num_splits == 1) {
    write_result(step, query.row->first_token + query.token, query.head, state);
    return;
  }
  const int64_t place = query.token * step.shared + query.head % step.shared;
  float* to = partials + schedule.partial(step, *query.row, split, query.head / step.shared) +
              place * AttentionSchedule::partial_width(step);
  to[0] = state.largest;
  to[1] = state.sum;
  std::memcpy(to + 2, state.values, static_cast<size_t>(step.v_dim) * sizeof(float));
}

// Scales of the keys or values of a split, for one head; 0 behind the last, up to a whole vector.
void gather_scales(const float* scales, int64_t heads, const int32_t* slots, int64_t count, float* out) {
  for (int64_t key = 0; key < count; ++key) out[key] = scales[slots[key] * heads];
  for (int64_t key = count; key < whole_vectors(count); ++key) out[key] = 0.0f;
}

void multiply_by(float* values, const float* factors, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(values + i, load(values + i) * load(factors + i));
}

// Each query's scores, or weights, times the scales of the keys, or values, they belong to.
template <class T>
void apply_scales(const AttentionStep& step, const AttentionTask& task, const float* scales, const int32_t* slots,
                  int64_t num_keys, int64_t count, float* scores) {
  if constexpr (kScaled<T>) {
    alignas(64) float factors[kSplitKeys];
    for (int32_t head = task.first_head; head < task.last_head; ++head) {
      gather_scales(scales + head, step.kv_heads, slots, num_keys, factors);
      for (int64_t query = 0; query < count; ++query, scores += kSplitKeys)
        multiply_by(scores, factors, whole_vectors(num_keys));
    }
  }
}

// What a task keeps: for each of its key heads the same queries, one after the other.
struct Work {
  int64_t heads, queries, q_width, v_width;
  float *q, *scores, *sums;

  Work(const AttentionStep& step, int64_t num_heads, int64_t num_queries, AttentionScratch& scratch)
      : heads(num_heads), queries(num_queries), q_width(whole_vectors(step.k_dim)), v_width(whole_vectors(step.v_dim)) {
    const int64_t q_size = AttentionScratch::padded(heads * queries * q_width);
    const int64_t sums_size = AttentionScratch::padded(heads * queries * v_width);
    scores = scratch.need(heads * queries * kSplitKeys + q_size + sums_size);
    q = scores + heads * queries * kSplitKeys;
    sums = q + q_size;
    std::fill(sums, sums + heads * queries * v_width, 0.0f);
  }
};

// Calls body(head, first, last) for pieces of a split that fit the first cache, and asks for the next piece meanwhile.
template <class T, class Body>
void for_pieces_of_keys(const Slotted<T>& rows, int64_t row_width, int64_t num_keys, int64_t heads, const Body& body) {
  Ahead ahead(reinterpret_cast<const char*>(rows.base), rows.stride * static_cast<int64_t>(sizeof(T)),
              row_width * static_cast<int64_t>(sizeof(T)), rows.slots, num_keys);
  ahead.next(kChunkKeys);
  for (int64_t first = 0; first < num_keys; first += kChunkKeys) {
    const int64_t last = std::min(first + kChunkKeys, num_keys);
    for (int64_t head = 0; head < heads; ++head) {
      ahead.next((kChunkKeys + heads - 1) / heads);
      body(head, first, last);
    }
  }
}

template <class T>
void attend(const AttentionStep& step, const AttentionSchedule& schedule, const AttentionTask& task, float* partials) {
  thread_local AttentionScratch scratch;
  thread_local std::vector<Query> queries;  // of the first key head
  queries.clear();
  for (int32_t place = task.first; place < task.last; ++place) {
    const ScheduledRow& row = schedule.rows[schedule.members[place]];
    for (int64_t token = 0; token < row.count; ++token)
      for (int64_t head = 0; head < step.shared; ++head) queries.push_back({&row, token, head});
  }
  const int64_t heads = task.last_head - task.first_head, count = static_cast<int64_t>(queries.size());
  Work work(step, heads, count, scratch);
  const auto query_at = [&](int64_t i) {
    Query query = queries[i % count];
    query.head += (task.first_head + i / count) * step.shared;
    return query;
  };
  for (int64_t i = 0; i < heads * count; ++i) {
    const Query query = query_at(i);
    read_query(step, query.row->first_token + query.token, query.head, work.q + i * work.q_width, work.q_width);
  }
  const Range range = keys_of(step, *queries[0].row, task.index);
  const int64_t num_keys = range.last - range.first;
  const int32_t* slots = queries[0].row->slots + range.first;
  Slotted<T> keys{reinterpret_cast<const T*>(step.keys) + task.first_head * step.k_dim, step.key_stride(), slots};
  for_pieces_of_keys(keys, heads * step.k_dim, num_keys, heads, [&](int64_t head, int64_t first, int64_t last) {
    score(work.q + head * count * work.q_width, count, work.q_width, keys.shifted(head * step.k_dim), step.k_dim, first,
          last, work.scores + head * count * kSplitKeys);
  });
  apply_scales<T>(step, task, step.key_scales, slots, num_keys, count, work.scores);
  thread_local std::vector<AttentionState> states;
  states.resize(static_cast<size_t>(heads * count));
  for (int64_t i = 0; i < heads * count; ++i) {
    const int64_t position = queries[i % count].row->position(queries[i % count].token);
    const int64_t last = std::clamp<int64_t>(position + 1 - range.first, 0, num_keys);
    const int64_t first = std::clamp<int64_t>(step.first_key(position) - range.first, 0, last);
    float* scores = work.scores + i * kSplitKeys;
    const float largest = prepare_scores(scores, whole_vectors(num_keys), first, last, step.softcap);
    states[i] = {largest, exponentiate(scores, whole_vectors(num_keys), largest), work.sums + i * work.v_width};
  }
  apply_scales<T>(step, task, step.value_scales, slots, num_keys, count, work.scores);
  Slotted<T> values{reinterpret_cast<const T*>(step.values) + task.first_head * step.v_dim, step.value_stride(), slots};
  for_pieces_of_keys(values, heads * step.v_dim, num_keys, heads, [&](int64_t head, int64_t first, int64_t last) {
    weigh(work.scores + head * count * kSplitKeys, count, values.shifted(head * step.v_dim), step.v_dim, first, last,
          work.sums + head * count * work.v_width, work.v_width);
  });
  for (int64_t i = 0; i < heads * count; ++i) put(step, schedule, task.index, query_at(i), states[i], partials);
}

}  // namespace

void attend_split(const AttentionStep& step, const AttentionSchedule& schedule, const AttentionTask& task,
                  float* partials) {
  with_stored(step.kv_dtype, "attention", [&]<class T>(T) { attend<T>(step, schedule, task, partials); });
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

// Attention over a pool of keys and values that is addressed by slots, and what writes that pool.
//
// Tables, lengths and slots are tensors that kernels read when they run, so a recorded step follows whatever the
// tensors hold at the time of a replay. Scores are never kept beyond one block of keys.
#pragma once

#include "core/tensor.h"

namespace cardan_native {

// A layer's keys [slots, kv_heads, k_dim] and values [slots, kv_heads, v_dim], of one type. Floats of 8 bits hold what
// is left after a division by the layer's own scale; int8 goes with a scale for each slot and head, which is written
// with the codes: the largest of a head has the code 127 or -127. No kind of 8 bits ever holds NaN or an infinity: what
// is too large becomes the largest, and NaN becomes 0.
struct LayerPool {
  const Tensor& keys;
  const Tensor& values;
  const Tensor* key_scales = nullptr;  // float32 [slots, kv_heads], for int8 only
  const Tensor* value_scales = nullptr;
  float key_scale = 1.0f, value_scale = 1.0f;
};

// Which sequences a step attends for. All int32.
struct AttentionRows {
  Tensor table;         // [groups, rows of the table, max_length]: the slot of each position
  int64_t group;        // of the layer
  Tensor row_ids;       // [rows]: row of the table
  Tensor query_starts;  // [rows + 1]: first token of each row in the batch
  Tensor seq_lens;      // [rows]: tokens after this step; 0 for a row that only fills up the batch
};

// What a layer does with scores.
struct AttentionLayer {
  float scale = 1.0f;
  int64_t window = 0;             // a query at p sees keys at positions above p - window; 0 sees all
  float softcap = 0.0f;           // cap * tanh(score / cap); 0 for none
  const Tensor* sinks = nullptr;  // float32 [q_heads]: scores without a value
};

// Attends with q [tokens, q_heads, k_dim] over a pool; returns [tokens, q_heads * v_dim] in the type of q.
// The tokens of a row stand at the end of its sequence. Tokens of rows of length 0, and tokens behind the last row's,
// give zeros. A row's result depends on that row only, to the bit.
// Computed in float32; but where the processor has tiles, and q and the pool are bfloat16, rows of more than one token
// and of more than 16 queries to a key head round weights of keys to bfloat16 before values are weighed by them.
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
Tensor attention(const Tensor& q, const LayerPool& pool, const AttentionRows& rows, const AttentionLayer& layer);

// Throws std::invalid_argument where scales are missing, or are there for a type that has none.
void check_scales(const char* op, const LayerPool& pool);

// Writes k [tokens, kv_heads, k_dim] and v [tokens, kv_heads, v_dim] to their slots, out_slots [groups, tokens];
// tokens whose slot is negative are left out.
void write_kv(const Tensor& k, const Tensor& v, const LayerPool& pool, const Tensor& out_slots, int64_t group);

// Changes of a table: table[group][rows[i], positions[i]] = slots[group][i] for all groups. Throws
// std::invalid_argument, and writes nothing, where a row, a position or a slot is outside.
struct TableChanges {
  const int32_t* rows;
  const int32_t* positions;
  const int32_t* slots;  // [groups, count]
  int64_t count;
};
void write_table(const Tensor& table, const TableChanges& changes, int64_t num_slots);

}  // namespace cardan_native

// Many rows of quantized activations times codes widened to int16, in pairs: where the processor multiplies pairs of
// int16 but has no dot products of four bytes, that takes activations of int16 in one go, and codes of 8 bits too.
//
// Half of the multiplications are saved by adding first: with codes c and activations x of two inner elements,
// (c0 + x1)(c1 + x0) = c0 x0 + c1 x1 + c0 c1 + x0 x1, of which the last two products belong to a column and to a row
// alone. Source: Winograd, "A new algorithm for inner product", 1968. Sums are taken modulo 2^32 and those of a unit
// fit, so they are the same integers as those of `linear_int8`, and so are results.

#include <algorithm>

#include "ops/linear_call.h"
#include "ops/linear_expand.h"
#include "ops/linear_lines.h"
#include "ops/linear_rounding.h"

namespace cardan_native {

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

namespace {

// Codes are widened into the first-level cache and are operands in memory of every row's instructions: how many of
// these there are is what limits the speed. Four panels are eight sums, which share the instructions that load values;
// with more, pieces would be shorter or leave the first-level cache.
constexpr int kMostPanels = 4;
constexpr int64_t kChunk = 128;  // inner elements widened at a time: 16 KiB, half a first-level cache
constexpr int64_t kChunkUnits = kChunk / 16;
constexpr int64_t kMostRows = 256;      // of a task
constexpr int64_t kTasksPerThread = 3;  // more and smaller ones widen the same codes more often

// Sums of a code and an activation must fit 16 bits: 32,639 + 127 do. Codes of bytes are taken less 128, others less
// their offset.
int centre_of(const PackedLinear& weight) { return weight.codes == Codes::kByte ? 128 : weight.offset; }

// What a row's unit goes with: the scale of its codes; scale times the sum of its codes, where the weight has minimums;
// and what sums of integers begin with.
struct RowUnit {
  float scale, sum;
  uint32_t start;
};

// Quantized rows, each four codes in the order 0, 2, 1, 3, as widening leaves those of the weight.
struct Rounded {
  const int16_t* codes;
  const RowUnit* units;
  int64_t code_stride, unit_stride;
};

// One piece of some panels, widened: codes less their centre, [kChunk / 4][2][panels][8][2] of inner elements 0 and 2,
// then 1 and 3, of four, and for each unit scales, minimums and what sums begin with, each [kChunkUnits][panels][16].
struct Piece {
  const int16_t* codes;
  const float *scales, *minimums;
  const uint32_t* starts;
  int64_t units;
};

vu words_of(vi x) { return (vu)x; }

uint32_t sum_words(vu x) {
  uint32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += x[lane];
  return sum;
}

// 16 codes as int16, each four in the order 0, 2, 1, 3.
vw narrow_codes(vi low, vi high) {
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)low, (__m256i)high), 0xd8);
  return (vw)_mm256_shufflehi_epi16(_mm256_shufflelo_epi16(packed, 0xd8), 0xd8);
}

// In every second lane the products of codes 0 and 1 and of codes 2 and 3 of four, added up; else 0.
vu products_of(vw codes) {
  const __m256i swapped = _mm256_shuffle_epi32((__m256i)codes, 0xb1);
  return words_of(dot_pairs(codes, (vw)swapped)) & (vu)_mm256_set1_epi64x(0xffffffff);
}

template <class T>
void round_row(const T* from, const PackedLinear& weight, int16_t* codes, RowUnit* units) {
  const int64_t per_group = kGroup / weight.unit();
  const float steps = steps_of(weight.activations);
  const auto centre = static_cast<uint32_t>(centre_of(weight) - weight.offset);
  for (int64_t group = 0; group < weight.columns / kGroup; ++group, codes += kGroup, units += per_group) {
    const RoundedGroup rounded = round_group(from + group * kGroup, steps);
    uint32_t sums[2], products[2];
    for (int half = 0; half < 2; ++half) {
      const vi low = rounded.codes[2 * half], high = rounded.codes[2 * half + 1];
      const vw narrowed = narrow_codes(low, high);
      std::memcpy(codes + half * kPanel, &narrowed, sizeof narrowed);
      sums[half] = sum_words(words_of(low) + words_of(high));
      products[half] = sum_words(products_of(narrowed));
    }
    if (per_group == 1) {
      sums[0] += sums[1];
      products[0] += products[1];
    }
    for (int64_t i = 0; i < per_group; ++i)
      units[i] = {rounded.scale, rounded.scale * static_cast<float>(static_cast<int32_t>(sums[i])),
                  centre * sums[i] - products[i]};
  }
}

int64_t code_stride_of(int64_t columns) { return columns + 32; }  // no power of two: those fall into one set of a cache

int64_t code_bytes_of(const PackedLinear& weight, int64_t rows) { return 2 * rows * code_stride_of(weight.columns); }

Rounded round_rows_of(const LinearCall& call, Pool& pool) {
  const PackedLinear& weight = *call.weight;
  const int64_t code_stride = code_stride_of(weight.columns), unit_stride = weight.columns / weight.unit();
  auto* codes = reinterpret_cast<int16_t*>(call.scratch);
  auto* units = reinterpret_cast<RowUnit*>(call.scratch + code_bytes_of(weight, call.x.rows));
  for_each_row(call.x.rows, call.x.width, pool, [&](int64_t row) {
    with_float(call.x.dtype, "linear", [&]<class T>(T) {
      round_row(call.x.at<T>(row), weight, codes + row * code_stride, units + row * unit_stride);
    });
  });
  return {codes, units, code_stride, unit_stride};
}

// Codes of one panel, and less the sums of their products what the sums of each unit begin with; `width` is that of all
// panels.
template <Codes kCodes, int kUnit>
void widen_groups(const uint8_t* group, int64_t count, int centre, int64_t width, int16_t* out, uint32_t* starts) {
  const vw centres = vw{} + static_cast<uint16_t>(centre);
  for (int64_t i = 0; i < count; ++i, group += group_bytes(kCodes)) {
    vu products[kPanelVectors] = {};
#pragma GCC unroll 8
    for (int step = 0; step < 8; ++step, out += 4 * width) {
      const Line line = load_line<kCodes>(group, step);
      for (int v = 0; v < kPanelVectors; ++v) {
        const vw even = (line.part[v] & 255) - centres, odd = (line.part[v] >> 8) - centres;
        std::memcpy(out + v * kLanes * 2, &even, sizeof even);
        std::memcpy(out + 2 * width + v * kLanes * 2, &odd, sizeof odd);
        products[v] -= words_of(dot_pairs(even, odd));
      }
      if ((step + 1) % (kUnit / 4)) continue;
      std::memcpy(starts, products, sizeof products);
      starts += width;
      for (int v = 0; v < kPanelVectors; ++v) products[v] = vu{};
    }
  }
}

template <int kUnit>
void widen_codes(const PackedLinear& weight, const uint8_t* groups, int64_t count, int64_t width, int16_t* out,
                 uint32_t* starts) {
  const int centre = centre_of(weight);
  switch (weight.codes) {
    case Codes::kNibble:
      return widen_groups<Codes::kNibble, kUnit>(groups, count, centre, width, out, starts);
    case Codes::kFive:
      return widen_groups<Codes::kFive, kUnit>(groups, count, centre, width, out, starts);
    case Codes::kSix:
      return widen_groups<Codes::kSix, kUnit>(groups, count, centre, width, out, starts);
    default:
      return widen_groups<Codes::kByte, kUnit>(groups, count, centre, width, out, starts);
  }
}

// acc[rows][panels][16] += some rows times a piece. Each unit is scaled as `add_unit` does it.
template <bool kMinimums, int kUnit, int kPanels>
[[gnu::noinline]] void multiply(const Piece& piece, const Rounded& x, int64_t rows, float* acc) {
  constexpr int kVectors = kPanels * kPanelVectors;
  constexpr int64_t kWidth = kPanels * kPanel, kPairs = 2 * kWidth;
  const Piece from = piece;
  for (int64_t row = 0; row < rows; ++row, acc += kWidth) {
    const int16_t *codes = from.codes, *values = x.codes + row * x.code_stride;
    const RowUnit* const row_units = x.units + row * x.unit_stride;
    for (int64_t unit = 0; unit < from.units; ++unit) {
      const RowUnit with = row_units[unit];
      const float *scales = from.scales + unit * kWidth, *minimums = from.minimums + unit * kWidth;
      vu sums[kVectors];
      for (int v = 0; v < kVectors; ++v)
        sums[v] = (vu)load_words(from.starts + unit * kWidth + v * kLanes) + with.start;
#pragma GCC unroll 2
      for (int four = 0; four < kUnit; four += 4, codes += 2 * kPairs, values += 4) {
        const vw even = broadcast_four(reinterpret_cast<const int8_t*>(values));
        const vw odd = broadcast_four(reinterpret_cast<const int8_t*>(values + 2));
        for (int v = 0; v < kVectors; ++v)
          sums[v] += words_of(dot_pairs(load_words(codes + v * kLanes * 2) + odd,
                                        load_words(codes + kPairs + v * kLanes * 2) + even));
      }
      const vf step = splat(with.scale), sum = splat(with.sum);
      __asm__ volatile("" ::: "memory");  // or totals are kept in memory twice
      for (int v = 0; v < kVectors; ++v) {
        const vf scale = load(scales + v * kLanes) * step;
        vf total = fused(__builtin_convertvector((vi)sums[v], vf), scale, load(acc + v * kLanes));
        if constexpr (kMinimums) total = fused(load(minimums + v * kLanes), sum, total);
        store(acc + v * kLanes, total);
      }
    }
  }
}

using Multiply = void (*)(const Piece&, const Rounded&, int64_t, float*);

template <int kPanels>
Multiply choose(const PackedLinear& weight) {
  if (weight.unit() < kGroup)
    return weight.has_minimums ? &multiply<true, 16, kPanels> : &multiply<false, 16, kPanels>;
  return weight.has_minimums ? &multiply<true, 32, kPanels> : &multiply<false, 32, kPanels>;
}

Multiply choose(const PackedLinear& weight, int64_t panels) {
  constexpr Multiply (*kBy[])(const PackedLinear&) = {choose<1>, choose<2>, choose<3>, choose<4>};
  return kBy[panels - 1](weight);
}

// Some panels, and some rows.
struct Block {
  int64_t panel, panels, row, rows;
};

void multiply_block(const LinearCall& call, const Rounded& x, const Block& block) {
  constexpr int64_t kMostWidth = kMostPanels * kPanel;
  alignas(64) float acc[kMostRows * kMostWidth], scales[kChunkUnits * kMostWidth], minimums[kChunkUnits * kMostWidth];
  alignas(64) uint32_t starts[kChunkUnits * kMostWidth];
  alignas(64) int16_t codes[kChunk * kMostWidth];
  const PackedLinear& weight = *call.weight;
  const int64_t unit = weight.unit(), width = block.panels * kPanel;
  const Multiply kernel = choose(weight, block.panels);
  std::fill(acc, acc + block.rows * width, 0.0f);
  for (int64_t column = 0; column < weight.columns; column += kChunk) {
    const int64_t count = std::min(kChunk, weight.columns - column);
    for (int64_t i = 0; i < block.panels; ++i) {
      const int64_t at = i * kPanel, panel = block.panel + i;
      alignas(64) float one_scales[kChunkUnits * kPanel], one_minimums[kChunkUnits * kPanel];
      expand_scales(weight, panel, column / unit, count / unit, one_scales, one_minimums);
      for (int64_t u = 0; u < count / unit; ++u) {
        std::memcpy(scales + u * width + at, one_scales + u * kPanel, kPanel * 4);
        if (weight.has_minimums) std::memcpy(minimums + u * width + at, one_minimums + u * kPanel, kPanel * 4);
      }
      const uint8_t* groups = weight.panel_codes(panel) + column / kGroup * group_bytes(weight.codes);
      if (unit == kGroup)
        widen_codes<32>(weight, groups, count / kGroup, width, codes + 2 * at, starts + at);
      else
        widen_codes<16>(weight, groups, count / kGroup, width, codes + 2 * at, starts + at);
    }
    const Rounded from{x.codes + block.row * x.code_stride + column,
                       x.units + block.row * x.unit_stride + column / unit, x.code_stride, x.unit_stride};
    kernel({codes, scales, minimums, starts, count / unit}, from, block.rows, acc);
  }
  finish(call, block.panel, block.panels, block.row, block.rows, acc);
}

// How a product is cut into tasks.
struct Cut {
  int64_t rows, blocks, panels, groups;
};

Cut cut_for(int64_t rows, int64_t panels, int64_t threads) {
  Cut cut{kMostRows, 0, kMostPanels, 0};
  const auto count = [&] {
    cut.blocks = (rows + cut.rows - 1) / cut.rows;
    cut.groups = (panels + cut.panels - 1) / cut.panels;
    return cut.blocks * cut.groups;
  };
  const int64_t wanted = threads == 1 ? 1 : kTasksPerThread * threads;
  while (count() < wanted && cut.rows > kRowBlock / 2 && cut.rows > rows / 2) cut.rows /= 2;
  while (count() < wanted && cut.panels > 1) --cut.panels;
  return cut;
}

}  // namespace

bool has_int16_pairs(const PackedLinear& weight) {
  return weight.activations == Activations::kInt16 ||
         (weight.activations == Activations::kInt8 && weight.codes == Codes::kByte);
}

int64_t int16_rows_bytes(const PackedLinear& weight, int64_t rows) {
  return code_bytes_of(weight, rows) + rows * (weight.columns / weight.unit()) * static_cast<int64_t>(sizeof(RowUnit));
}

void linear_int16_pairs(const LinearCall& call, Pool& pool) {
  const Rounded x = round_rows_of(call, pool);
  const Cut cut = cut_for(call.x.rows, call.weight->panels(), pool.threads());
  pool.parallel(cut.groups * cut.blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t row = task / cut.groups * cut.rows, panel = task % cut.groups * cut.panels;
      multiply_block(call, x, {panel, std::min(cut.panels, call.weight->panels() - panel), row,
                               std::min(cut.rows, call.x.rows - row)});
    }
  });
}

#else

bool has_int16_pairs(const PackedLinear&) { return false; }

int64_t int16_rows_bytes(const PackedLinear&, int64_t) { return 0; }

void linear_int16_pairs(const LinearCall&, Pool&) {}

#endif

}  // namespace cardan_native

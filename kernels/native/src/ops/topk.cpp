// The k largest of rows that are much longer than k.
//
// A row is cut into blocks. The k-th largest of the blocks' largest values is a bound that at least k values reach, and
// few others do; so one pass in vectors finds the blocks' largest, and only blocks that reach the bound are looked at
// again. What they hold is put in order by integers that compare as wanted: value first, then lower index.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/dispatch.h"
#include "core/pieces.h"
#include "ops/logits.h"
#include "simd/vec.h"

namespace cardan_native {
namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kBlocksPerWanted = 2;  // with fewer blocks than this times k, the bound would let most values through

// Larger for larger values, and for lower indices of equal values; all NaN are below everything.
uint64_t order_of(float value, int64_t index) {
  uint32_t key = 0;
  if (value == value) {
    const uint32_t bits = bits_of(value + 0.0f);  // 0 and -0 are equal
    key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }
  return static_cast<uint64_t>(key) << 32 | (0xffffffffu - static_cast<uint32_t>(index));
}

int64_t index_of(uint64_t order) { return 0xffffffffu - static_cast<uint32_t>(order); }

// The largest value of each block; NaN are passed over.
void find_largest(const float* x, int64_t width, float* largest) {
  for (int64_t start = 0; start < width; start += kBlock) {
    const int64_t stop = std::min(start + kBlock, width);
    vf most = splat(-INFINITY);
    int64_t column = start;
    for (; column + kLanes <= stop; column += kLanes) most = larger(load(x + column), most);
    float result = max_lanes(most);
    for (; column < stop; ++column) result = x[column] > result ? x[column] : result;
    largest[start / kBlock] = result;
  }
}

// Values that may be among the k largest.
std::vector<uint64_t> candidates(const float* x, int64_t width, const float* largest, int64_t k) {
  const int64_t blocks = (width + kBlock - 1) / kBlock;
  std::vector<float> sorted(largest, largest + blocks);
  std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<float>());
  const float bound = sorted[static_cast<size_t>(k - 1)];
  std::vector<uint64_t> found;
  found.reserve(static_cast<size_t>(4 * k));
  for (int64_t block = 0; block < blocks; ++block) {
    if (largest[block] < bound) continue;
    const int64_t stop = std::min((block + 1) * kBlock, width);
    for (int64_t column = block * kBlock; column < stop; ++column)
      if (x[column] >= bound) found.push_back(order_of(x[column], column));
  }
  return found;
}

void put_largest(const float* x, int64_t width, std::vector<uint64_t> found, int64_t k, float* values, int32_t* ids) {
  if (static_cast<int64_t>(found.size()) < k) {  // few blocks, or a row with many NaN: look at all of it
    found.resize(static_cast<size_t>(width));
    for (int64_t column = 0; column < width; ++column)
      found[static_cast<size_t>(column)] = order_of(x[column], column);
  }
  if (k < static_cast<int64_t>(found.size()))
    std::nth_element(found.begin(), found.begin() + k, found.end(), std::greater<uint64_t>());
  std::sort(found.begin(), found.begin() + k, std::greater<uint64_t>());
  for (int64_t place = 0; place < k; ++place) {
    const int64_t index = index_of(found[static_cast<size_t>(place)]);
    ids[place] = static_cast<int32_t>(index);
    values[place] = x[index];
  }
}

}  // namespace

std::pair<Tensor, Tensor> topk(const Tensor& x, int64_t k) {
  expect_dtype("topk", "x", x, DType::kF32);
  if (k < 1 || k > x.width()) refuse("topk", "x", "at least k = " + std::to_string(k) + " (1 or more) columns wide", x);
  Shape dims = x.dims();
  dims.back() = k;
  Tensor values = Tensor::empty(dims, DType::kF32), ids = Tensor::empty(dims, DType::kI32);
  const int64_t blocks = (x.width() + kBlock - 1) / kBlock;
  const Tensor room = Tensor::empty({std::max<int64_t>(1, x.rows() * blocks)}, DType::kF32);
  dispatch({&x, &room, &values, &ids}, [from = Lines(x), largest = room.ptr<float>(), to = Rows(values),
                                        places = Rows(ids), blocks, k](Pool& pool) {
    const bool bounded = blocks >= kBlocksPerWanted * k;
    if (bounded) {
      for_pieces(pool, from.rows, from.width, [&](int64_t row, int64_t start, int64_t count) {
        find_largest(from.at<float>(row) + start, count, largest + row * blocks + start / kBlock);
      });
    }
    pool.parallel(from.rows, bounded ? 1 : rows_per_piece(from.width), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const float* scores = from.at<float>(row);
        std::vector<uint64_t> found;
        if (bounded) found = candidates(scores, from.width, largest + row * blocks, k);
        put_largest(scores, from.width, std::move(found), k, to.at<float>(row), places.at<int32_t>(row));
      }
    });
  });
  return {values, ids};
}

}  // namespace cardan_native

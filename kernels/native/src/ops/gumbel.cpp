#include "ops/gumbel.h"

#include "core/dispatch.h"
#include "core/pieces.h"
#include "simd/vec.h"

namespace cardan_native {
namespace {

// kLanes values of 8 bytes; the compiler makes two registers of each.
typedef double vd __attribute__((vector_size(kLanes * 8)));
typedef uint64_t vl __attribute__((vector_size(kLanes * 8)));
typedef int64_t vs __attribute__((vector_size(kLanes * 8)));

constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57, kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr int kRounds = 10;
constexpr int64_t kBlocksAtOnce = kLanes;  // so that the words of some blocks fill whole vectors

void philox(uint32_t counter, uint32_t position, uint64_t seed, uint32_t* words) {
  uint32_t c0 = counter, c1 = position, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round, k0 += kWeyl0, k1 += kWeyl1) {
    const uint64_t product0 = static_cast<uint64_t>(kMultiplier0) * c0;
    const uint64_t product1 = static_cast<uint64_t>(kMultiplier1) * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

constexpr uint64_t kTwoTo52 = 0x4330000000000000;  // bits of 2^52: its low bits hold a whole number below

// Whole numbers below 2^52 as doubles.
inline vd whole(vl value) { return (vd)(value | kTwoTo52) - 0x1p52; }

// The natural logarithm of positive, normal doubles, within some 1e-13 of its size.
// x = 2^e m with m from sqrt(1/2) to sqrt(2), and log m = 2 artanh((m - 1) / (m + 1)) by its series.
inline vd log(vd x) {
  constexpr uint64_t kRootHalf = 0x3FE6A09E667F3BCD;  // bits of sqrt(1/2)
  // Less the root's bits, the exponent field counts how often 2 has to be taken out.
  const vl shifted = (vl)x - kRootHalf + 0x3FF0000000000000;
  const vd exponent = whole(shifted >> 52) - 1023.0;
  const vd m = (vd)((shifted & 0x000FFFFFFFFFFFFF) + kRootHalf);
  const vd s = (m - 1.0) / (m + 1.0), square = s * s;
  vd series = square * (1.0 / 15) + 1.0 / 13;
  for (const double term : {1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0}) series = series * square + term;
  return exponent * 0.69314718055994530942 + 2.0 * s * series;
}

// Noise of kLanes words.
inline void noise_of(const uint32_t* words, float* out) {
  vu bits;
  std::memcpy(&bits, words, sizeof bits);
  const vd u = (whole(__builtin_convertvector(bits, vl)) + 0.5) * 0x1p-32;
  const vf noise = __builtin_convertvector(-log(-log(u)), vf);
  std::memcpy(out, &noise, sizeof noise);
}

void noise_of_part(const uint32_t* words, float* out, int64_t count) {
  uint32_t some[kLanes] = {};
  float results[kLanes];
  std::memcpy(some, words, static_cast<size_t>(count) * 4);
  noise_of(some, results);
  std::memcpy(out, results, static_cast<size_t>(count) * 4);
}

// Noise of ids first to first + count in order; first is a multiple of 4.
void noise_in_order(uint64_t seed, uint32_t position, int64_t first, int64_t count, float* out) {
  uint32_t words[4 * kBlocksAtOnce];
  for (int64_t done = 0; done < count; done += 4 * kBlocksAtOnce) {
    for (int64_t block = 0; block < kBlocksAtOnce; ++block)
      philox(static_cast<uint32_t>((first + done) / 4 + block), position, seed, words + 4 * block);
    for (int64_t start = 0; start < 4 * kBlocksAtOnce && done + start < count; start += kLanes)
      noise_of_part(words + start, out + done + start, std::min<int64_t>(kLanes, count - done - start));
  }
}

// The counters of rows, read when a kernel runs.
struct Keys {
  const uint32_t* seeds;
  const int32_t* positions;

  uint64_t seed(int64_t row) const { return seeds[2 * row] | static_cast<uint64_t>(seeds[2 * row + 1]) << 32; }
  uint32_t position(int64_t row) const { return static_cast<uint32_t>(positions[row]); }
};

Keys keys_of(const Tensor& seeds, const Tensor& positions) {
  expect_dtype("gumbel", "seeds", seeds, DType::kI32);
  expect_rank("gumbel", "seeds", seeds, 2);
  expect_shape("gumbel", "seeds", seeds, {seeds.shape[0], 2});
  expect_dtype("gumbel", "positions", positions, DType::kI32);
  expect_shape("gumbel", "positions", positions, {seeds.shape[0]});
  if (!seeds.contiguous()) refuse("gumbel", "seeds", "contiguous", seeds);
  return {seeds.ptr<uint32_t>(), positions.ptr<int32_t>()};
}

}  // namespace

Tensor gumbel(const Tensor& seeds, const Tensor& positions, const Tensor& ids) {
  const Keys keys = keys_of(seeds, positions);
  expect_dtype("gumbel", "ids", ids, DType::kI32);
  expect_rank("gumbel", "ids", ids, 2);
  expect_shape("gumbel", "ids", ids, {seeds.shape[0], ids.shape[1]});
  Tensor out = Tensor::empty(ids.dims(), DType::kF32);
  dispatch({&seeds, &positions, &ids, &out}, [keys, from = Rows(ids), to = Rows(out)](Pool& pool) {
    for_pieces(pool, to.rows, to.width, [&](int64_t row, int64_t start, int64_t count) {
      const int32_t* wanted = from.at<int32_t>(row) + start;
      for (int64_t done = 0; done < count; done += kLanes) {
        uint32_t words[kLanes] = {};
        const int64_t part = std::min<int64_t>(kLanes, count - done);
        for (int64_t lane = 0; lane < part; ++lane) {
          const uint32_t id = static_cast<uint32_t>(wanted[done + lane]);
          uint32_t block[4];
          philox(id >> 2, keys.position(row), keys.seed(row), block);
          words[lane] = block[id & 3];
        }
        noise_of_part(words, to.at<float>(row) + start + done, part);
      }
    });
  });
  return out;
}

Tensor gumbel_all(const Tensor& seeds, const Tensor& positions, int64_t width) {
  const Keys keys = keys_of(seeds, positions);
  if (width < 0) throw std::invalid_argument("gumbel: ids must be 0 or more, got " + std::to_string(width));
  Tensor out = Tensor::empty({seeds.shape[0], width}, DType::kF32);
  dispatch({&seeds, &positions, &out}, [keys, to = Rows(out)](Pool& pool) {
    for_pieces(pool, to.rows, to.width, [&](int64_t row, int64_t start, int64_t count) {
      noise_in_order(keys.seed(row), keys.position(row), start, count, to.at<float>(row) + start);
    });
  });
  return out;
}

}  // namespace cardan_native

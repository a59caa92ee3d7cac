// SPDX-License-Identifier: Apache-2.0
// Attention-free scores of tokens, higher = keep; the formulas are in
// entropykv_vllm/kernels/scores.
#include "formats.cuh"

namespace entropykv::cuda {
namespace {

constexpr float kEps = 1e-12f;
constexpr float kFloatMax = 3.40282347e38f;
constexpr int kNeighbours = 5;
// Tokens that a lane has under way at once, so that the memory is kept busy.
constexpr int kAhead = 4;

// A length that float32 can divide by and multiply with.
__device__ __forceinline__ float clamp_length(float square) {
  const float x = sqrtf(square);
  return x < kEps ? kEps : x > kFloatMax ? kFloatMax : x;
}

__device__ __forceinline__ float row_length(const float x[8], const Lanes& lanes) {
  float square = 0;
  EKV_UNROLL for (int i = 0; i < 8; ++i) square += x[i] * x[i];
  return clamp_length(row_sum(square, lanes));
}

// kAhead rows of the block's tokens from `first` on; zeros where there is no token or channel.
template <int format> struct Ahead {
  Eight<format> held[kAhead];

  __device__ __forceinline__ void fetch(const Moves& m, const Row& row, const Lanes& lanes,
                                        int first, Side side) {
    EKV_UNROLL for (int i = 0; i < kAhead; ++i) {
      held[i] = {};
      const int t = first + i * lanes.rows + lanes.row;
      if (lanes.busy && t < m.tokens()) held[i] = load_token<format>(m, row, t, side, lanes.unit);
    }
  }
};

// -- each token by itself --

__device__ __forceinline__ float hash_score(const float key[8], const Lanes& lanes) {
  unsigned long long mixed = 0;
  EKV_UNROLL for (int i = 0; i < 8; ++i) {
    const long long bits = int(__float_as_uint(key[i]));
    mixed += static_cast<unsigned long long>(bits) *
             ((2ull * (8 * lanes.unit + i) + 1) * 0x9E3779B97F4A7C15ull);
  }
  mixed = row_sum(lanes.busy ? mixed : 0, lanes);
  for (int i = 0; i < 2; ++i)
    mixed = (mixed ^ static_cast<unsigned long long>(static_cast<long long>(mixed) >> 33)) *
            0xFF51AFD7ED558CCDull;
  return float(int(mixed >> 40 & 0xFFFFFF)) / 16777216.0f;
}

// A block for each kAhead rows of a row's tokens.
template <int format>
__global__ void token_kernel(EKV_PARAMETER Moves m, int policy, float* scores) {
  const Lanes lanes(m.pages.head_size);
  const int of_block = kAhead * lanes.rows, blocks = (m.tokens() + of_block - 1) / of_block;
  const int64_t at = blockIdx.x / blocks;
  const int first = int(blockIdx.x % blocks) * of_block;
  const Row row(m, at);
  Ahead<format> keys, values;
  keys.fetch(m, row, lanes, first, kKeys);
  if (policy == kNorm) values.fetch(m, row, lanes, first, kValues);
  EKV_UNROLL for (int i = 0; i < kAhead; ++i) {
    float x[8], score;
    keys.held[i].get(x);
    if (policy == kRandom) {
      score = hash_score(x, lanes);
    } else {
      score = -row_length(x, lanes);
      if (policy == kNorm) {
        values.held[i].get(x);
        score = row_length(x, lanes) / -score;
      }
    }
    const int t = first + i * lanes.rows + lanes.row;
    if (lanes.unit == 0 && t < m.tokens()) scores[at * m.tokens() + t] = score;
  }
}

// -- against the mean of the unit keys --

// What the block's rows have added up, in the order of the rows, to a unit vector in shared memory.
__device__ void unit_mean(const float sum[8], const Lanes& lanes, int D, float* shared) {
  float *parts = shared + D, *warps = parts + lanes.rows * D;
  if (lanes.busy)
    EKV_UNROLL for (int i = 0; i < 8; ++i) parts[lanes.row * D + 8 * lanes.unit + i] = sum[i];
  __syncthreads();
  float total = 0;
  const int d = threadIdx.x;
  if (d < D)
    for (int row = 0; row < lanes.rows; ++row) total += parts[row * D + d];
  const float length = clamp_length(block_sum(total * total, warps));
  if (d < D) shared[d] = total / length;
  __syncthreads();
}

// A block for each row: it reads the keys twice, since the mean must be known before any token can
// be compared with it. Segments are larger than what a block can keep in shared memory on any GPU;
// but the blocks that run at once read some megabytes, so the second time keys come from the L2
// cache. That is why one block does both, though a launch for each would give more blocks.
template <int format>
__global__ void distinct_kernel(EKV_PARAMETER Moves m, bool by_values, float* scores, float* raw) {
  EKV_SHARED(memory);
  auto* anchor = reinterpret_cast<float*>(memory);
  const Lanes lanes(m.pages.head_size);
  const Row row(m, blockIdx.x);
  const int tokens = m.tokens(), step = kAhead * lanes.rows;
  float sum[8] = {0}, x[8];
  for (int first = 0; first < tokens; first += step) {
    Ahead<format> keys;
    keys.fetch(m, row, lanes, first, kKeys);
    EKV_UNROLL for (int i = 0; i < kAhead; ++i) {
      keys.held[i].get(x);
      const float inverse = 1 / row_length(x, lanes);
      EKV_UNROLL for (int j = 0; j < 8; ++j) sum[j] += x[j] * inverse;
    }
  }
  unit_mean(sum, lanes, m.pages.head_size, anchor);
  float mean[8];
  EKV_UNROLL for (int j = 0; j < 8; ++j) mean[j] = lanes.busy ? anchor[8 * lanes.unit + j] : 0;
  float* out = (by_values ? raw : scores) + int64_t{blockIdx.x} * tokens;
  for (int first = 0; first < tokens; first += step) {
    Ahead<format> keys, values;
    keys.fetch(m, row, lanes, first, kKeys);
    if (by_values) values.fetch(m, row, lanes, first, kValues);
    EKV_UNROLL for (int i = 0; i < kAhead; ++i) {
      keys.held[i].get(x);
      const float inverse = 1 / row_length(x, lanes);
      float cosine = 0;
      EKV_UNROLL for (int j = 0; j < 8; ++j) cosine += x[j] * inverse * mean[j];
      float score = -row_sum(cosine, lanes);
      if (by_values) {
        values.held[i].get(x);
        const float distinct = 1 + score;
        // Rounding can put a cosine above 1.
        score = (distinct < 0 ? 0 : distinct) * row_length(x, lanes);
      }
      const int t = first + i * lanes.rows + lanes.row;
      if (lanes.unit == 0 && t < tokens) out[t] = score;
    }
  }
  if (!by_values) return;
  __syncthreads();
  // The mean over the neighbours that there are.
  for (int t = threadIdx.x; t < tokens; t += kThreads) {
    const int begin = max(t - kNeighbours / 2, 0), end = min(t + kNeighbours / 2 + 1, tokens);
    float total = 0;
    for (int i = begin; i < end; ++i) total += out[i];
    scores[int64_t{blockIdx.x} * tokens + t] = total / float(end - begin);
  }
}

template <int format>
void score_format(const Moves& m, int policy, float* scores, float* raw, Stream stream) {
  int lanes = 2;
  while (lanes * 8 < m.pages.head_size) lanes *= 2;
  const int rows = kThreads / lanes, of_block = kAhead * rows;
  if (policy == kEntropykv || policy == kKeydiff) {
    const size_t shared = sizeof(float) * ((rows + 1) * m.pages.head_size + kWarps);
    auto* kernel = distinct_kernel<format>;
    EKV_LAUNCH(kernel, m.rows(), shared, stream, m, policy == kEntropykv, scores, raw);
  } else {
    auto* kernel = token_kernel<format>;
    const int64_t blocks = (m.tokens() + of_block - 1) / of_block;
    EKV_LAUNCH(kernel, m.rows() * blocks, 0, stream, m, policy, scores);
  }
}

} // namespace

const char* score(const Moves& m, int policy, float* scores, float* raw, Stream stream) {
  switch (m.format) {
  case kHot32: score_format<kHot32>(m, policy, scores, raw, stream); break;
  case kHotB16: score_format<kHotB16>(m, policy, scores, raw, stream); break;
  case kHot16: score_format<kHot16>(m, policy, scores, raw, stream); break;
  case kCold8: score_format<kCold8>(m, policy, scores, raw, stream); break;
  default: score_format<kCold4>(m, policy, scores, raw, stream);
  }
  return launched();
}

} // namespace entropykv::cuda

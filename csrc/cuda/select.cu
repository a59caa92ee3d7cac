// SPDX-License-Identifier: Apache-2.0
// Which tokens stay, given their scores; as entropykv_vllm/kernels/select.py.
#include "device.cuh"

namespace entropykv::cuda {
namespace {

__device__ __forceinline__ bool finite(float x) {
  return fabsf(x) <= 3.40282347e38f;
}

__device__ __forceinline__ const float* scores_of(const Moves& m, int64_t group, int head) {
  return m.scores + group / m.moves * m.score_stride +
         (group % m.moves * m.pages.heads + head) * m.tokens();
}

// -- one choice for all heads: the sum of their standardized scores --

// Mean and deviation of a head's finite scores.
struct Spread {
  float mean, deviation;

  __device__ Spread(const float* scores, int tokens, double* shared) {
    double sum = 0, square = 0, count = 0;
    for (int t = threadIdx.x; t < tokens; t += kThreads)
      if (finite(scores[t])) sum += scores[t], ++count;
    count = fmax(block_sum(count, shared), 1.0);
    mean = float(block_sum(sum, shared) / count);
    for (int t = threadIdx.x; t < tokens; t += kThreads) {
      const float centred = scores[t] - mean;
      if (finite(centred)) square += double(centred) * centred;
    }
    deviation = fmaxf(float(sqrt(block_sum(square, shared) / count)), 1e-12f);
  }
};

// A block for each layer of a move.
__global__ void total_kernel(EKV_PARAMETER Moves m, float* total) {
  EKV_SHARED(memory);
  auto* shared = reinterpret_cast<double*>(memory);
  float* out = total + int64_t{blockIdx.x} * m.tokens();
  for (int head = 0; head < m.pages.heads; ++head) {
    const float* scores = scores_of(m, blockIdx.x, head);
    const Spread spread(scores, m.tokens(), shared);
    for (int t = threadIdx.x; t < m.tokens(); t += kThreads) {
      const float standard = (scores[t] - spread.mean) / spread.deviation;
      out[t] = head ? out[t] + standard : standard;
    }
  }
}

// -- the best --

// Larger for what is rather kept: any number, then NaN. Zeros are equal.
__device__ __forceinline__ unsigned rank_of(float score) {
  if (score != score) return 0;
  const unsigned bits = __float_as_uint(score + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Units {
  const float* scores;
  int count, protect;

  __device__ __forceinline__ unsigned operator()(int i) const {
    // As good as +inf, and before any other that is.
    return rank_of(i < protect ? __uint_as_float(0x7F800000u) : scores[i]);
  }
};

// The rank of the last of the best, and how many of that rank are among them.
struct Last {
  unsigned rank, wanted;
};

// Counts of the ranks by eight of their bits; numbers of the block's warps; what one thread found.
struct Bins {
  unsigned counts[256], greater[kWarps], equal[kWarps];
  Last last;
};

// The bin in which the last of the best lies: one warp adds up from the highest bin on.
__device__ void pick_bin(Bins& bins, const Last& last, int shift) {
  const int lane = threadIdx.x;
  unsigned own = 0;
  for (int i = 0; i < 8; ++i) own += bins.counts[255 - 8 * lane - i];
  unsigned sum = own;
  for (int step = 1; step < 32; step *= 2) {
    const unsigned other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += other;
  }
  unsigned before = sum - own;
  if (before >= last.wanted || sum < last.wanted) return;
  int bin = 255 - 8 * lane;
  for (; before + bins.counts[bin] < last.wanted; --bin) before += bins.counts[bin];
  bins.last = {last.rank | unsigned(bin) << shift, last.wanted - before};
}

__device__ Last find_last(const Units& units, int keep, Bins& bins) {
  Last last{0, unsigned(keep)};
  for (int shift = 24; shift >= 0; shift -= 8) {
    bins.counts[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < units.count; i += kThreads) {
      const unsigned rank = units(i);
      if ((uint64_t{rank ^ last.rank} >> (shift + 8)) == 0)
        atomicAdd(&bins.counts[rank >> shift & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x < 32) pick_bin(bins, last, shift);
    __syncthreads();
    last = bins.last;
  }
  return last;
}

// Those above the last one's rank and the first ones of it, in their order.
__device__ void write_best(const Units& units, const Last& last, int* best, Bins& bins) {
  const unsigned warp = threadIdx.x / 32, lower = (1u << threadIdx.x % 32) - 1;
  unsigned greater = 0, equal = 0; // before this round
  for (int first = 0; first < units.count; first += kThreads) {
    const int i = first + int(threadIdx.x);
    const unsigned rank = i < units.count ? units(i) : 0;
    const bool above = i < units.count && rank > last.rank;
    const bool same = i < units.count && rank == last.rank;
    const unsigned above_lanes = __ballot_sync(kAllLanes, above);
    const unsigned same_lanes = __ballot_sync(kAllLanes, same);
    if (threadIdx.x % 32 == 0) {
      bins.greater[warp] = __popc(above_lanes);
      bins.equal[warp] = __popc(same_lanes);
    }
    __syncthreads();
    unsigned above_before = greater + __popc(above_lanes & lower);
    unsigned same_before = equal + __popc(same_lanes & lower);
    for (unsigned w = 0; w < kWarps; ++w) {
      if (w < warp) above_before += bins.greater[w], same_before += bins.equal[w];
      greater += bins.greater[w];
      equal += bins.equal[w];
    }
    if (above || (same && same_before < last.wanted))
      best[above_before + min(same_before, last.wanted)] = i;
    __syncthreads();
  }
}

// Mean scores of runs, a warp for each.
__device__ void write_means(const float* scores, int units, int run, float* means) {
  for (int unit = threadIdx.x / 32; unit < units; unit += kWarps) {
    float sum = 0;
    for (int t = threadIdx.x % 32; t < run; t += 32) sum += scores[int64_t{unit} * run + t];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) means[unit] = sum / float(run);
  }
}

// A block for each choice.
__global__ void select_kernel(EKV_PARAMETER Moves m, int* best, const float* total, float* means) {
  EKV_SHARED(memory);
  auto& bins = *reinterpret_cast<Bins*>(memory);
  const int64_t at = blockIdx.x, group = m.by_layer ? at : at / m.pages.heads;
  const int units = m.units(), keep = m.keep() / m.run;
  const float* scores =
      m.by_layer ? total + at * m.tokens() : scores_of(m, group, int(at % m.pages.heads));
  if (m.run > 1) {
    write_means(scores, units, m.run, means + at * units);
    __syncthreads();
    scores = means + at * units;
  }
  const int64_t sinks = m.sinks[group % m.moves];
  const int protect = int((min(max(sinks, int64_t{0}), int64_t{m.keep()}) + m.run - 1) / m.run);
  const Units all{scores, units, protect};
  write_best(all, find_last(all, keep, bins), best + at * keep, bins);
}

} // namespace

const char* select(const Moves& m, int* best, float* total, float* means, Stream stream) {
  if (m.by_layer) EKV_LAUNCH(total_kernel, m.groups(), kWarps * sizeof(double), stream, m, total);
  EKV_LAUNCH(select_kernel, m.by_layer ? m.groups() : m.rows(), sizeof(Bins), stream, m, best,
             total, means);
  return launched();
}

} // namespace entropykv::cuda

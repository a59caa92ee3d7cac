// SPDX-License-Identifier: Apache-2.0
// The tokens that stay, quantized or as they are, to the bytes of cold pages.
#include "formats.cuh"

namespace entropykv::cuda {
namespace {

// A block works on this many tokens of a page, keys or values: those that share scales of keys.
constexpr int kTokens = kGroup;

// A block's share of a page.
struct Part {
  int64_t row; // of the moves
  int page;    // of those that are written
  Side side;
  int first, count; // tokens of the page

  __device__ explicit Part(const Moves& m) {
    const int parts = groups(m.pages.cold_tokens);
    int64_t i = blockIdx.x;
    first = int(i % parts) * kTokens, i /= parts;
    side = Side(i % 2), i /= 2;
    page = int(i % m.into);
    row = i / m.into;
    count = min(kTokens, m.pages.cold_tokens - first);
  }

  // Of all that the move reads, the token that becomes the t-th of this part.
  __device__ __forceinline__ int token(const Moves& m, int t) const {
    return kept_token(m, row, page * m.pages.cold_tokens + first + t);
  }
};

// Eight channels of the t-th token of a part, zeros where there is none. Which token that is takes
// two loads, so lanes have kAhead of them under way.
constexpr int kAhead = 2;

template <int format> __device__ __forceinline__ Eight<format>
load_part(const Moves& m, const Part& part, const Row& row, const Lanes& lanes, int t) {
  if (!lanes.busy || t >= part.count) return {};
  return load_token<format>(m, row, part.token(m, t), part.side, lanes.unit);
}

// Lowest and highest of each channel of the block's tokens, `range` being [2][rows][D].
template <int format>
__device__ void find_ranges(const Moves& m, const Part& part, const Lanes& lanes, float* range) {
  const int D = m.pages.head_size;
  const Row row(m, part.row);
  float low[8], high[8], x[8];
  EKV_UNROLL for (int j = 0; j < 8; ++j) low[j] = kHalfMax, high[j] = -kHalfMax;
  for (int first = 0; first < part.count; first += kAhead * lanes.rows) {
    Eight<format> held[kAhead];
    EKV_UNROLL for (int i = 0; i < kAhead; ++i) held[i] =
        load_part<format>(m, part, row, lanes, first + i * lanes.rows + lanes.row);
    EKV_UNROLL for (int i = 0; i < kAhead; ++i) {
      if (first + i * lanes.rows + lanes.row >= part.count) continue;
      held[i].get(x);
      EKV_UNROLL for (int j = 0; j < 8; ++j) {
        low[j] = fminf(low[j], storable(x[j]));
        high[j] = fmaxf(high[j], storable(x[j]));
      }
    }
  }
  if (!lanes.busy) return;
  float* of_row = range + lanes.row * D + 8 * lanes.unit;
  EKV_UNROLL for (int j = 0; j < 8; ++j) {
    of_row[j] = low[j];
    of_row[lanes.rows * D + j] = high[j];
  }
}

// Scales and zeros of the channels, to the page and to shared memory.
__device__ void scale_channels(const float* range, int rows, int D, int bits, uint16_t* scales,
                               uint16_t* zeros, float* scale, float* zero) {
  const int d = threadIdx.x;
  if (d >= D) return;
  float low = range[d], high = range[rows * D + d];
  for (int row = 1; row < rows; ++row) {
    low = fminf(low, range[row * D + d]);
    high = fmaxf(high, range[(rows + row) * D + d]);
  }
  const Affine affine(low, high, bits);
  scales[d] = uint16_t(affine.scale);
  zeros[d] = uint16_t(affine.zero);
  scale[d] = float_of_half(affine.scale);
  zero[d] = float_of_half(affine.zero);
}

// The tokens are read twice: the second time from the L1 cache, as a block has 64 KB or less of
// them.
template <int format, int bits> __device__ void
quantize_keys(const Moves& m, const Part& part, const Lanes& lanes, uint8_t* to, float* shared) {
  const int D = m.pages.head_size, group = part.first / kGroup;
  const ColdLayout layout{D, m.pages.cold_tokens, bits};
  const Row row(m, part.row);
  float *scales = shared, *zeros = shared + D, *range = shared + 2 * D;
  find_ranges<format>(m, part, lanes, range);
  __syncthreads();
  scale_channels(range, lanes.rows, D, bits,
                 reinterpret_cast<uint16_t*>(to + layout.key_scale()) + group * D,
                 reinterpret_cast<uint16_t*>(to + layout.key_zero()) + group * D, scales, zeros);
  __syncthreads();
  Scale scale[8];
  EKV_UNROLL for (int j = 0; j < 8; ++j) {
    const int d = lanes.busy ? 8 * lanes.unit + j : 0;
    scale[j] = Scale(scales[d], zeros[d]);
  }
  for (int first = 0; first < part.count; first += lanes.rows) {
    const int t = first + lanes.row;
    float x[8];
    load_part<format>(m, part, row, lanes, t).get(x);
    const uint2 codes = codes_of<bits>(x, [&](int j) { return scale[j]; });
    store_codes<bits>(to + int64_t{part.first + t} * (D * bits / 8), codes, lanes, D,
                      lanes.busy && t < part.count);
  }
}

// A token of a part and its scale and zero; all lanes of a warp call this.
template <int bits>
__device__ __forceinline__ void quantize_value(const float x[8], uint8_t* to, int t, int D,
                                               const ColdLayout& layout, const Lanes& lanes,
                                               bool present) {
  float low = kHalfMax, high = -kHalfMax;
  if (lanes.busy) EKV_UNROLL for (int j = 0; j < 8; ++j) {
      low = fminf(low, storable(x[j]));
      high = fmaxf(high, storable(x[j]));
    }
  const Affine affine(row_min(low, lanes), row_max(high, lanes), bits);
  const Scale scale(float_of_half(affine.scale), float_of_half(affine.zero));
  const uint2 codes = codes_of<bits>(x, [&](int) { return scale; });
  store_codes<bits>(to + layout.value_codes() + int64_t{t} * (D * bits / 8), codes, lanes, D,
                    lanes.busy && present);
  if (lanes.unit == 0 && present) {
    reinterpret_cast<uint16_t*>(to + layout.value_scale())[t] = uint16_t(affine.scale);
    reinterpret_cast<uint16_t*>(to + layout.value_zero())[t] = uint16_t(affine.zero);
  }
}

template <int format, int bits>
__device__ void quantize_values(const Moves& m, const Part& part, const Lanes& lanes, uint8_t* to) {
  const ColdLayout layout{m.pages.head_size, m.pages.cold_tokens, bits};
  const Row row(m, part.row);
  for (int first = 0; first < part.count; first += kAhead * lanes.rows) {
    Eight<format> held[kAhead];
    EKV_UNROLL for (int i = 0; i < kAhead; ++i) held[i] =
        load_part<format>(m, part, row, lanes, first + i * lanes.rows + lanes.row);
    EKV_UNROLL for (int i = 0; i < kAhead; ++i) {
      const int t = first + i * lanes.rows + lanes.row;
      float x[8];
      held[i].get(x);
      quantize_value<bits>(x, to, part.first + t, m.pages.head_size, layout, lanes, t < part.count);
    }
  }
}

template <int format, int bits> __global__ void quantize_kernel(EKV_PARAMETER Moves m) {
  EKV_SHARED(memory);
  const Part part(m);
  const Lanes lanes(m.pages.head_size);
  uint8_t* to = made(m, Row(m, part.row), part.row, part.page);
  if (part.side == kKeys)
    quantize_keys<format, bits>(m, part, lanes, to, reinterpret_cast<float*>(memory));
  else
    quantize_values<format, bits>(m, part, lanes, to);
}

// Tokens that keep their bits. `vectors`: of 16 bytes in eight channels.
template <int vectors> __global__ void copy_kernel(EKV_PARAMETER Moves m) {
  const Part part(m);
  const Lanes lanes(m.pages.head_size);
  const Row row(m, part.row);
  uint8_t* to = made(m, row, part.row, part.page);
  for (int t = lanes.row; t < part.count && lanes.busy; t += lanes.rows) {
    const int from = part.token(m, t), page = from / m.pages.page;
    const auto at = [&](int token) {
      return hot_at(m.pages.head_size, token, part.side, lanes.unit) * (2 * vectors);
    };
    const uint8_t* source_bytes = source(m, row, page) + at(from - page * m.pages.page);
    uint8_t* target_bytes = to + at(part.first + t);
    EKV_UNROLL for (int i = 0; i < vectors; ++i)
        store(target_bytes + 16 * i, load<uint4>(source_bytes + 16 * i));
  }
}

// Pages that stay whole, a block for each.
__global__ void gather_pages_kernel(EKV_PARAMETER Moves m) {
  const int64_t at = blockIdx.x / m.into;
  const int page = int(blockIdx.x % m.into);
  const Row row(m, at);
  const uint8_t* from = source(m, row, kept_unit(m, at, page));
  uint8_t* to = made(m, row, at, page);
  for (int64_t i = 16 * int64_t{threadIdx.x}; i < m.used; i += 16 * kThreads)
    store(to + i, load<uint4>(from + i));
}

template <int format, int bits> void launch_quantize(const Moves& m, int64_t blocks, Stream s) {
  int lanes = 2;
  while (lanes * 8 < m.pages.head_size) lanes *= 2;
  const size_t shared = sizeof(float) * 2 * m.pages.head_size * (kThreads / lanes + 1);
  auto* kernel = quantize_kernel<format, bits>;
  EKV_LAUNCH(kernel, blocks, shared, s, m);
}

template <int format> void launch_hot(const Moves& m, int64_t blocks, Stream stream) {
  if (m.pages.bits == 8)
    launch_quantize<format, 8>(m, blocks, stream);
  else
    launch_quantize<format, 4>(m, blocks, stream);
}

} // namespace

const char* gather(const Moves& m, Stream stream) {
  const int64_t blocks = m.rows() * m.into * 2 * groups(m.pages.cold_tokens);
  auto* copy = m.pages.type == kFloat32 ? copy_kernel<2> : copy_kernel<1>;
  if (m.pages.bits == 16) {
    EKV_LAUNCH(copy, blocks, 0, stream, m);
    return launched();
  }
  switch (m.format) {
  case kHot32: launch_hot<kHot32>(m, blocks, stream); break;
  case kHotB16: launch_hot<kHotB16>(m, blocks, stream); break;
  case kHot16: launch_hot<kHot16>(m, blocks, stream); break;
  case kCold8: launch_quantize<kCold8, 8>(m, blocks, stream); break;
  default: launch_quantize<kCold4, 4>(m, blocks, stream);
  }
  return launched();
}

const char* gather_pages(const Moves& m, Stream stream) {
  EKV_LAUNCH(gather_pages_kernel, m.rows() * m.into, 0, stream, m);
  return launched();
}

} // namespace entropykv::cuda

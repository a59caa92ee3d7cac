// SPDX-License-Identifier: Apache-2.0
// Eight channels of a token from a page of any format, and from numbers to codes.
#pragma once

#include "device.cuh"

namespace entropykv::cuda {

enum Side { kKeys = 0, kValues = 1 };

// Eight channels, in as few registers as they need.
template <int format> struct Eight {
  uint4 raw;
  __device__ void get(float x[8]) const {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
    EKV_UNROLL for (int i = 0; i < 8; ++i) {
      const unsigned bits = words[i / 2] >> (i % 2 * 16) & 0xFFFF;
      x[i] = format == kHotB16 ? float_of_bfloat(bits) : float_of_half(bits);
    }
  }
};
struct EightFloats {
  float4 low, high;
  __device__ void get(float x[8]) const {
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  }
};
template <> struct Eight<kHot32> : EightFloats {};
template <> struct Eight<kCold8> : EightFloats {};
template <> struct Eight<kCold4> : EightFloats {};

// Eight halves at once.
static __device__ __forceinline__ void load_halves(const uint8_t* p, float x[8]) {
  Eight<kHot16>{load<uint4>(p)}.get(x);
}

// Eight codes: signed bytes, or halves of bytes whose other half is a channel head_size / 2 away.
template <int format>
static __device__ __forceinline__ void load_codes(const uint8_t* row, int unit, int D, float x[8]) {
  const int half = D / 16; // units in the low halves
  const bool high = format == kCold4 && unit >= half;
  const uint2 raw = load<uint2>(row + 8 * (high ? unit - half : unit));
  EKV_UNROLL for (int i = 0; i < 8; ++i) {
    const unsigned byte = (i < 4 ? raw.x : raw.y) >> (i % 4 * 8) & 0xFF;
    x[i] = format == kCold8 ? float(int(byte << 24) >> 24) : float(high ? byte >> 4 : byte & 15);
  }
}

// Where they are in a hot page, in numbers: of each token it has the key, then the value.
static __device__ __forceinline__ int64_t hot_at(int D, int t, Side side, int unit) {
  return (2 * int64_t{t} + side) * D + 8 * unit;
}

// Channels 8 * unit and on of token t of a page, given one head's bytes of it.
template <int format> static __device__ __forceinline__ Eight<format>
load_eight(const Moves& m, const uint8_t* head, int t, Side side, int unit) {
  const int D = m.pages.head_size;
  if constexpr (format == kHotB16 || format == kHot16) {
    return {load<uint4>(head + hot_at(D, t, side, unit) * 2)};
  } else if constexpr (format == kHot32) {
    const uint8_t* at = head + hot_at(D, t, side, unit) * 4;
    return {load<float4>(at), load<float4>(at + 16)};
  } else {
    constexpr int bits = format == kCold8 ? 8 : 4;
    const ColdLayout layout{D, m.page_tokens, bits};
    float codes[8], scale[8], zero[8];
    load_codes<format>(head + side * layout.codes() + int64_t{t} * (D * bits / 8), unit, D, codes);
    if (side == kKeys) {
      const int at = 2 * (t / kGroup * D + 8 * unit);
      load_halves(head + layout.key_scale() + at, scale);
      load_halves(head + layout.key_zero() + at, zero);
    } else {
      const auto* s = reinterpret_cast<const uint16_t*>(head + layout.value_scale());
      const auto* z = reinterpret_cast<const uint16_t*>(head + layout.value_zero());
      EKV_UNROLL for (int i = 0; i < 8; ++i) scale[i] = float_of_half(s[t]),
                                             zero[i] = float_of_half(z[t]);
    }
    float x[8];
    EKV_UNROLL for (int i = 0; i < 8; ++i) x[i] = zero[i] + scale[i] * codes[i];
    return {make_float4(x[0], x[1], x[2], x[3]), make_float4(x[4], x[5], x[6], x[7])};
  }
}

// The same of token t of all that a row's move reads.
template <int format> static __device__ __forceinline__ Eight<format>
load_token(const Moves& m, const Row& row, int t, Side side, int unit) {
  const int page = t / m.page_tokens;
  return load_eight<format>(m, source(m, row, page), t - page * m.page_tokens, side, unit);
}

// -- quantization, as entropykv_vllm/kernels/formats.py --

constexpr float kHalfMax = 65504.0f;
constexpr float kInfinity = __builtin_huge_valf();

// What cannot be stored: NaN becomes 0, the rest is clamped.
static __device__ __forceinline__ float storable(float x) {
  return fminf(fmaxf(x == x ? x : 0.0f, -kHalfMax), kHalfMax);
}

// The largest finite half that is not above x, as bits; and the smallest that is not below.
static __device__ __forceinline__ unsigned half_down(float x) {
  const unsigned near = half_of_float(x);
  if (!(float_of_half(near) > x)) return near;
  return near & 0x8000 ? near + 1 : near - 1;
}
static __device__ __forceinline__ unsigned half_up(float x) {
  return half_down(-x) ^ 0x8000;
}

// A number is zero + scale * code.
struct Affine {
  unsigned scale, zero; // halves

  __device__ Affine(float low, float high, int bits) {
    if (bits == 4) {
      zero = half_down(low);
      scale = half_up((high - float_of_half(zero)) / 15.0f);
      return;
    }
    zero = half_of_float((low + high) / 2.0f);
    const float centre = float_of_half(zero);
    scale = half_up(fmaxf(high - centre, centre - low) / 127.0f);
  }
};

// Scale and zero as they are used, in few registers. The scale is a half, so rounding to one gives
// it back from its inverse; that of 0 is infinite.
struct Scale {
  float zero, inverse;

  __device__ Scale() {}
  __device__ Scale(float s, float z) : zero(z), inverse(1 / s) {}
  __device__ float scale() const { return float_of_half(half_of_float(1 / inverse)); }
};

// The code of a storable number. A product with the inverse is much cheaper than a quotient, and
// rounds to the same code but where the quotient lies next to the middle of two.
template <int bits> static __device__ __forceinline__ int code_of(float x, const Scale& s) {
  constexpr float first = bits == 4 ? 0.0f : -127.0f, last = bits == 4 ? 15.0f : 127.0f;
  const float product = (x - s.zero) * s.inverse;
  float code = rintf(product);
  if (fabsf(product - code) > 0.4999f) code = rintf((x - s.zero) / s.scale());
  return s.inverse < kInfinity ? int(fminf(fmaxf(code, first), last)) : 0;
}

// Eight codes as bytes; scale_of(i) is the scale of the i-th.
template <int bits, class ScaleOf>
static __device__ __forceinline__ uint2 codes_of(const float x[8], const ScaleOf& scale_of) {
  unsigned words[2] = {0, 0};
  EKV_UNROLL for (int i = 0; i < 8; ++i) {
    const int code = code_of<bits>(storable(x[i]), scale_of(i));
    words[i / 4] |= (unsigned(code) & 0xFF) << (i % 4 * 8);
  }
  return make_uint2(words[0], words[1]);
}

// Codes of a token, from its lanes to its row; all lanes of a warp call this.
template <int bits> static __device__ __forceinline__ void
store_codes(uint8_t* row, uint2 codes, const Lanes& lanes, int D, bool present) {
  if constexpr (bits == 4) {
    const int half = D / 16, other = int(threadIdx.x % 32) + half;
    const unsigned x = __shfl_sync(kAllLanes, codes.x, other);
    const unsigned y = __shfl_sync(kAllLanes, codes.y, other);
    codes = make_uint2(codes.x | x << 4, codes.y | y << 4);
    present = present && lanes.unit < half;
  }
  if (present) store<uint2>(row + 8 * lanes.unit, codes);
}

} // namespace entropykv::cuda

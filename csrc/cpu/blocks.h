// SPDX-License-Identifier: Apache-2.0
// A block is 8 rows of a matrix product's inner dimension x 16 columns, in any format: 8 channels
// of 16 keys, or 8 values of 16 channels. `Block<format>::load` turns it into floats.
#pragma once

#include "vec.h"

namespace {

enum Format { kF32, kBf16, kF16, kQ8, kQ4 };

template <int format> struct Block;

template <> struct Block<kF32> {
  EKV_INLINE void load(const uint8_t* from, vf out[8]) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) out[k] = ::load(reinterpret_cast<const float*>(from) + 16 * k);
  }
};

template <> struct Block<kBf16> {
  EKV_INLINE void load(const uint8_t* from, vf out[8]) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const vu pair = load_u32(from + 64 * k);
      out[2 * k] = as_float(pair << 16);
      out[2 * k + 1] = as_float(pair & set1u(0xffff0000u));
    }
  }
};

template <> struct Block<kF16> {
  EKV_INLINE void load(const uint8_t* from, vf out[8]) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const vu pair = load_u32(from + 64 * k);
      out[2 * k] = from_half(pair & set1u(0xffff));
      out[2 * k + 1] = from_half(pair >> 16);
    }
  }
};

// Sign and magnitude in a byte.
EKV_INLINE vf from_code8(vu code) {
  return as_float(as_bits(to_float(code & set1u(0x7f))) | ((code & set1u(0x80)) << 24));
}

template <> struct Block<kQ8> {
  EKV_INLINE void load(const uint8_t* from, vf out[8]) {
    for (int k = 0; k < 4; ++k) {
      uint8_t row[32];
      for (int part = 0; part < 4; ++part)
        memcpy(row + 8 * part, from + entropykv::byte_of_code8(k, 8 * part), 8);
      const vu pair = load_u16(row);
      out[2 * k] = from_code8(pair & set1u(0xff));
      out[2 * k + 1] = from_code8(pair >> 8);
    }
  }
};

// Codes of four bits are read as -8 to 7: a rounded factor then costs half as much.
constexpr float kCentre4 = 8.0f;

template <> struct Block<kQ4> {
  EKV_INLINE void load(const uint8_t* from, vf out[8]) {
    const vu words = load_u32(from);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      out[2 * k] = to_float((words >> (4 * k)) & set1u(15)) - set1(kCentre4);
      out[2 * k + 1] = to_float((words >> (16 + 4 * k)) & set1u(15)) - set1(kCentre4);
    }
  }
};

constexpr float centre(int format) {
  return format == kQ4 ? kCentre4 : 0.0f;
}
constexpr bool quantized(int format) {
  return format == kQ8 || format == kQ4;
}
constexpr int block_bytes(int format) {
  return format == kF32 ? 512 : format == kQ8 ? 128 : format == kQ4 ? 64 : 256;
}

} // namespace

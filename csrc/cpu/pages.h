// SPDX-License-Identifier: Apache-2.0
// Reading and writing pages: the way in and out of every format.
#pragma once

#include "blocks.h"
#include "kernels.h"

namespace {

using entropykv::byte_of_code8;
using entropykv::Cache;
using entropykv::ColdLayout;
using entropykv::head_of;
using entropykv::kGroup;

// Elements from the start of a head's bytes: key and value of a token's channel in a hot page.
EKV_INLINE int64_t key_at(const Cache& c, int pair, int t, int d) {
  return (int64_t{t / 16} * (c.head_size / pair) + d / pair) * 16 * pair + t % 16 * pair + d % pair;
}
EKV_INLINE int64_t value_at(const Cache& c, int pair, int t, int d) {
  return (int64_t{d / 16} * (c.page / pair) + t / pair) * 16 * pair + d % 16 * pair + t % pair;
}

// A token's channels: four bytes (a number, or a pair of them) to every 64th byte of its tile's
// keys, and single numbers to its row of the values.
template <class Item>
static void write_token(const Cache& c, uint8_t* head, int t, const Item* key, const Item* value) {
  constexpr int pair = 4 / sizeof(Item);
  uint8_t* keys = head + key_at(c, pair, t, 0) * sizeof(Item);
  for (int d = 0; d < c.head_size; d += pair) memcpy(keys + d / pair * 64, key + d, 4);
  uint8_t* values = head + int64_t{c.page} * c.head_size * sizeof(Item);
  for (int d = 0; d < c.head_size; d += 16) {
    uint8_t* row = values + value_at(c, pair, t, d) * sizeof(Item);
    for (int i = 0; i < 16; ++i) memcpy(row + 4 * i, value + d + i, sizeof(Item));
  }
}

static void write_token(const Cache& c, uint8_t* head, int t, const float* key,
                        const float* value) {
  if (c.type == entropykv::kFloat32) return write_token<float>(c, head, t, key, value);
  uint16_t keys[entropykv::kMaxHead], values[entropykv::kMaxHead];
  for (int d = 0; d < c.head_size; d += 16) {
    store_type(reinterpret_cast<uint8_t*>(keys + d), load(key + d), c.type);
    store_type(reinterpret_cast<uint8_t*>(values + d), load(value + d), c.type);
  }
  write_token<uint16_t>(c, head, t, keys, values);
}

static void write_tokens(const Cache& c, const uint8_t* key, const uint8_t* value, int type,
                         int64_t key_stride, int64_t value_stride, const int64_t* slots,
                         int64_t tokens, int head) {
  const int D = c.head_size, item = entropykv::item_bytes(type);
  float k[entropykv::kMaxHead], v[entropykv::kMaxHead];
  for (int64_t i = 0; i < tokens; ++i) {
    if (slots[i] < 0) continue;
    for (int d = 0; d < D; d += 16) {
      store(k + d, load_type(key + (i * key_stride + int64_t{head} * D + d) * item, type));
      store(v + d, load_type(value + (i * value_stride + int64_t{head} * D + d) * item, type));
    }
    write_token(c, head_of(c, slots[i] / c.page, head), int(slots[i] % c.page), k, v);
  }
}

// Eight rows of 16 columns, transposed to 16 rows of which these are eight columns.
EKV_INLINE void store_columns(float* to, int64_t stride, const vf block[8]) {
  float lanes[8][16];
  for (int k = 0; k < 8; ++k) store(lanes[k], block[k]);
  for (int c = 0; c < 16; ++c)
    for (int k = 0; k < 8; ++k) to[c * stride + k] = lanes[k][c];
}

// Blocks of keys and values to float32 [tokens][head_size], as they are stored.
template <int format> static void read_blocks(const uint8_t* key, const uint8_t* value, int tokens,
                                              int D, float* keys, float* values) {
  vf block[8];
  for (int t = 0; t < tokens; t += 16)
    for (int d = 0; d < D; d += 8, key += block_bytes(format)) {
      Block<format>::load(key, block);
      store_columns(keys + int64_t{t} * D + d, D, block);
    }
  for (int d = 0; d < D; d += 16)
    for (int t = 0; t < tokens; t += 8, value += block_bytes(format)) {
      Block<format>::load(value, block);
      for (int k = 0; k < 8; ++k) store(values + int64_t{t + k} * D + d, block[k]);
    }
}

static void read_hot(const Cache& c, const int64_t* pages, int count, int head, float* keys,
                     float* values) {
  const int64_t n = int64_t{c.page} * c.head_size;
  for (int i = 0; i < count; ++i, keys += n, values += n) {
    const uint8_t* from = head_of(c, pages[i], head);
    const uint8_t* value = from + n * entropykv::item_bytes(c.type);
    switch (c.type) {
    case entropykv::kFloat32:
      read_blocks<kF32>(from, value, c.page, c.head_size, keys, values);
      break;
    case entropykv::kBFloat16:
      read_blocks<kBf16>(from, value, c.page, c.head_size, keys, values);
      break;
    default: read_blocks<kF16>(from, value, c.page, c.head_size, keys, values);
    }
  }
}

template <int format>
static void read_codes(const Cache& c, const uint8_t* from, float* keys, float* values) {
  const int D = c.head_size, T = c.cold_tokens;
  const ColdLayout layout{D, T, c.bits};
  read_blocks<format>(from, from + layout.value_codes(), T, D, keys, values);
  for (int t = 0; t < T; ++t) {
    const uint8_t* scale = from + layout.key_scale() + int64_t{2} * (t / kGroup) * D;
    const uint8_t* zero = from + layout.key_zero() + int64_t{2} * (t / kGroup) * D;
    const vf value_scale =
        set1(half_to_float(load_as<uint16_t>(from + layout.value_scale() + 2 * t)));
    const vf value_zero =
        set1(half_to_float(load_as<uint16_t>(from + layout.value_zero() + 2 * t)));
    for (int d = 0; d < D; d += 16) {
      float* key = keys + int64_t{t} * D + d;
      float* value = values + int64_t{t} * D + d;
      const vf key_scale = from_half(load_u16(scale + 2 * d)),
               key_zero = from_half(load_u16(zero + 2 * d));
      store(key, fma(key_scale, load(key) + set1(centre(format)), key_zero));
      store(value, fma(value_scale, load(value) + set1(centre(format)), value_zero));
    }
  }
}

static void read_cold(const Cache& c, int64_t page, int head, float* keys, float* values) {
  const uint8_t* from = head_of(c, page, head);
  if (c.bits == 8) return read_codes<kQ8>(c, from, keys, values);
  if (c.bits == 4) return read_codes<kQ4>(c, from, keys, values);
  read_hot(c, &page, 1, head, keys, values);
}

constexpr float kHalfMax = 65504.0f;

// A finite half at or above, at or below x.
EKV_INLINE uint16_t half_up(float x) {
  uint16_t h = float_to_half(x);
  if (half_to_float(h) < x) h = h & 0x8000 ? (h == 0x8000 ? 1 : h - 1) : h + 1;
  return h;
}
EKV_INLINE uint16_t half_down(float x) {
  uint16_t h = float_to_half(x);
  if (half_to_float(h) > x) h = h & 0x8000 ? h + 1 : (h == 0 ? 0x8001 : h - 1);
  return h;
}

struct Affine {
  uint16_t scale, zero;
};

EKV_INLINE Affine affine(float low, float high, int bits) {
  Affine a;
  if (bits == 4) {
    a.zero = half_down(low);
    a.scale = half_up((high - half_to_float(a.zero)) / 15);
    return a;
  }
  a.zero = float_to_half((low + high) / 2);
  const float zero = half_to_float(a.zero), up = high - zero, down = zero - low;
  a.scale = half_up((up > down ? up : down) / 127);
  return a;
}

// What cannot be stored: NaN becomes 0, the rest is clamped.
EKV_INLINE vf storable(vf x) {
  EKV_EACH x.p[j] = x.p[j] == x.p[j] ? x.p[j] : pf{};
  return max(min(x, set1(kHalfMax)), set1(-kHalfMax));
}

// Codes of 16 numbers as integers; sign and magnitude for 8 bits.
EKV_INLINE vu codes_of(vf x, vf scale, vf zero, int bits) {
  const vf limit = set1(bits == 4 ? 15.0f : 127.0f);
  const vf quotient = (x - zero) / where_less(set1(0), scale, scale, set1(1));
  const vf lowest = bits == 4 ? set1(0) : set1(-127.0f);
  vf n = rint(max(min(quotient, limit), lowest));
  n = where_less(set1(0), scale, n, set1(0));
  const vu magnitude = to_int(abs(n));
  return bits == 4 ? magnitude
                   : magnitude |
                         ((as_bits(where_less(n, set1(0), set1(-1), set1(1))) >> 24) & set1u(0x80));
}

EKV_INLINE void store_u8(uint8_t* to, vu x) {
  uint16_t lanes[16];
  store_u16(lanes, x);
  for (int i = 0; i < 16; ++i) to[i] = uint8_t(lanes[i]);
}

static void quantize_keys(const float* keys, int tokens, int D, int bits, uint8_t* scale,
                          uint8_t* zero, uint8_t* codes) {
  for (int first = 0; first < tokens; first += kGroup, scale += 2 * D, zero += 2 * D) {
    const int end = tokens - first < kGroup ? tokens : first + kGroup;
    for (int d = 0; d < D; d += 16) {
      vf low = storable(load(keys + int64_t{first} * D + d)), high = low;
      for (int t = first + 1; t < end; ++t) {
        const vf x = storable(load(keys + int64_t{t} * D + d));
        low = min(low, x);
        high = max(high, x);
      }
      float lows[16], highs[16];
      store(lows, low);
      store(highs, high);
      for (int i = 0; i < 16; ++i) {
        const Affine a = affine(lows[i], highs[i], bits);
        memcpy(scale + 2 * (d + i), &a.scale, 2);
        memcpy(zero + 2 * (d + i), &a.zero, 2);
      }
      const vf s = from_half(load_u16(scale + 2 * d)), z = from_half(load_u16(zero + 2 * d));
      for (int t = first; t < end; ++t)
        store_u8(codes + int64_t{t} * D + d,
                 codes_of(storable(load(keys + int64_t{t} * D + d)), s, z, bits));
    }
  }
}

static void quantize_values(const float* values, int tokens, int D, int bits, uint8_t* scale,
                            uint8_t* zero, uint8_t* codes) {
  for (int t = 0; t < tokens; ++t) {
    const float* row = values + int64_t{t} * D;
    vf low = storable(load(row)), high = low;
    for (int d = 16; d < D; d += 16) {
      low = min(low, storable(load(row + d)));
      high = max(high, storable(load(row + d)));
    }
    const Affine a = affine(-largest(set1(0) - low), largest(high), bits);
    memcpy(scale + 2 * t, &a.scale, 2);
    memcpy(zero + 2 * t, &a.zero, 2);
    const vf s = set1(half_to_float(a.scale)), z = set1(half_to_float(a.zero));
    for (int d = 0; d < D; d += 16)
      store_u8(codes + int64_t{t} * D + d, codes_of(storable(load(row + d)), s, z, bits));
  }
}

// A block of codes from [rows k * 2 + parity][columns], of the given strides.
static void pack_block(const uint8_t* codes, int64_t row_stride, int64_t column_stride, int bits,
                       uint8_t* to) {
  for (int c = 0; c < 16; ++c)
    for (int e = 0; e < 2; ++e) {
      const int w = 2 * c + e;
      uint16_t word = 0;
      for (int k = 0; k < 4; ++k) {
        const uint8_t code = codes[(2 * k + e) * row_stride + c * column_stride];
        if (bits == 4)
          word |= uint16_t(code << (4 * k));
        else
          to[byte_of_code8(k, w)] = code;
      }
      if (bits == 4) memcpy(to + 2 * w, &word, 2);
    }
}

static void write_codes(const Cache& c, uint8_t* to, const float* keys, const float* values,
                        uint8_t* codes) {
  const int D = c.head_size, T = c.cold_tokens, bits = c.bits, block = 16 * bits;
  const ColdLayout layout{D, T, bits};
  quantize_keys(keys, T, D, bits, to + layout.key_scale(), to + layout.key_zero(), codes);
  uint8_t* out = to;
  for (int t = 0; t < T; t += 16)
    for (int d = 0; d < D; d += 8, out += block)
      pack_block(codes + int64_t{t} * D + d, 1, D, bits, out);
  quantize_values(values, T, D, bits, to + layout.value_scale(), to + layout.value_zero(), codes);
  out = to + layout.value_codes();
  for (int d = 0; d < D; d += 16)
    for (int t = 0; t < T; t += 8, out += block)
      pack_block(codes + int64_t{t} * D + d, D, 1, bits, out);
}

static void write_page(const Cache& c, int64_t page, int head, const float* keys,
                       const float* values, uint8_t* codes) {
  uint8_t* to = head_of(c, page, head);
  if (c.bits < 16) return write_codes(c, to, keys, values, codes);
  for (int t = 0; t < c.page; ++t)
    write_token(c, to, t, keys + int64_t{t} * c.head_size, values + int64_t{t} * c.head_size);
}

} // namespace

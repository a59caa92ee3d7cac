// SPDX-License-Identifier: Apache-2.0
// The bytes of a page, for C++ and CUDA; entropykv_vllm/plan/capacity.py and kernels/formats.py say
// the same to Python.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define EKV_HD __host__ __device__
#else
#define EKV_HD
#endif

namespace entropykv {

enum Type { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr int kTile = 16;          // tokens of a tile of keys, channels of a block of values
constexpr int kBlock = 8;          // channels (keys) or tokens (values) of a block of codes
constexpr int kGroup = 64;         // tokens whose keys share a scale and a zero per channel
constexpr int kMaxHead = 256;      // largest head size
constexpr int kLongestUnit = 1024; // the longest that the shortest segment may be, in tokens
// What is more is refused, so that numbers of tokens fit an int.
constexpr int kMostHeads = 1 << 16;  // of a cache
constexpr int kMostPage = 1 << 16;   // tokens of a hot page
constexpr int kMostTokens = 1 << 30; // of a request, or of a move

EKV_HD constexpr int item_bytes(int type) {
  return type == kFloat32 ? 4 : 2;
}

EKV_HD constexpr int64_t head_bytes(int head_size, int page, int item) {
  return int64_t{2} * head_size * page * item;
}

EKV_HD constexpr int groups(int tokens) {
  return (tokens + kGroup - 1) / kGroup;
}

// The order of what lies in a page's parts: CPUs have tiles, GPUs have rows, see kernels/layout.py.
// The parts themselves lie where they do in both.

// One KV head of a cold page: codes of keys, codes of values, scales and zeros (16 bit floats).
struct ColdLayout {
  int head_size, tokens, bits;

  EKV_HD constexpr int64_t codes() const { return int64_t{tokens} * head_size * bits / 8; }
  EKV_HD constexpr int64_t value_codes() const { return codes(); }
  EKV_HD constexpr int64_t key_scale() const { return 2 * codes(); }
  EKV_HD constexpr int64_t key_zero() const {
    return key_scale() + int64_t{2} * groups(tokens) * head_size;
  }
  EKV_HD constexpr int64_t value_scale() const {
    return key_zero() + int64_t{2} * groups(tokens) * head_size;
  }
  EKV_HD constexpr int64_t value_zero() const { return value_scale() + int64_t{2} * tokens; }
  EKV_HD constexpr int64_t bytes() const { return value_zero() + int64_t{2} * tokens; }
};

EKV_HD constexpr int64_t gcd(int64_t a, int64_t b) {
  return b == 0 ? a : gcd(b, a % b);
}

// Tokens in a cold page, which has as many bytes as a hot one; 0 if not one tile fits.
EKV_HD constexpr int capacity(int head_size, int page, int item, int bits) {
  if (bits == 16) return page;
  const int64_t room = head_bytes(head_size, page, item);
  const int64_t longest = page > kLongestUnit ? page : kLongestUnit;
  int tokens = int(8 * room / (int64_t{2} * head_size * bits) / kTile * kTile);
  while (tokens > 0 && (ColdLayout{head_size, tokens, bits}.bytes() > room ||
                        page / gcd(page, tokens) * tokens > longest))
    tokens -= kTile;
  return tokens;
}

// One layer's cache, and how its cold pages are stored.
struct Geometry {
  int64_t page_bytes, head_bytes; // of all heads of a page, of one
  int heads, head_size, page;     // page: tokens of a hot one
  int type, bits, cold_tokens;    // type: of hot numbers
};

// Tiles: where the code of pair-row k (0 to 3) and word w = 2 * column + parity lies in a block of
// 128. Four bits: bits 4k to 4k + 3 of word w. Eight bits: this byte.
EKV_HD constexpr int byte_of_code8(int k, int w) {
  return (k / 2) * 64 + (w / 8) * 16 + (k % 2) * 8 + w % 8;
}

} // namespace entropykv

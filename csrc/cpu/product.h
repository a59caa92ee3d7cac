// SPDX-License-Identifier: Apache-2.0
// out[r][c] (+)= sum over k of a[r][k] * b[k][c]: the one product of attention, over blocks.
#pragma once

#include "blocks.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#include <immintrin.h>
#define EKV_PAIRS 1
#else
#define EKV_PAIRS 0
#endif

namespace {

#if EKV_WIDTH == 16
constexpr int kRows = 8, kColumns = 2;
#elif EKV_WIDTH == 8
constexpr int kRows = 4, kColumns = 1;
#else
constexpr int kRows = 2, kColumns = 1;
#endif

template <int format> EKV_INLINE void fetch(const uint8_t* block) {
  for (int line = 0; line < block_bytes(format); line += 64) __builtin_prefetch(block + line, 0, 2);
}

// Rows of `a` as float32.
struct FloatProduct {
  typedef float Element;
  static constexpr bool in_tiles = false;

  template <int format, int rows, int columns>
  EKV_INLINE void tile(const float* a, int64_t a_stride, const uint8_t* const* b,
                       const uint8_t* const* ahead, int blocks, float* out, int64_t out_stride,
                       bool add) {
    vf acc[rows][columns];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < columns; ++c)
        acc[r][c] = add ? load(out + r * out_stride + 16 * c) : set1(0);
    if constexpr (format == kF32) {
      // What needs no conversion is loaded row by row: each number of `a` is fetched once.
      for (int i = 0; i < 8 * blocks; ++i) {
        vf row[columns];
#pragma GCC unroll 2
        for (int c = 0; c < columns; ++c)
          row[c] = load(reinterpret_cast<const float*>(b[c]) + 16 * i);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
          const vf x = set1(a[r * a_stride + i]);
#pragma GCC unroll 2
          for (int c = 0; c < columns; ++c) acc[r][c] = fma(x, row[c], acc[r][c]);
        }
        if (ahead && i % 8 == 0)
          for (int c = 0; c < columns; ++c) fetch<format>(ahead[c] + int64_t{i} * 64);
      }
    } else
      for (int i = 0; i < blocks; ++i) {
#pragma GCC unroll 2
        for (int c = 0; c < columns; ++c) {
          vf block[8];
          Block<format>::load(b[c] + int64_t{i} * block_bytes(format), block);
          if (ahead) fetch<format>(ahead[c] + int64_t{i} * block_bytes(format));
#pragma GCC unroll 8
          for (int k = 0; k < 8; ++k)
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r)
              acc[r][c] = fma(set1(a[r * a_stride + 8 * i + k]), block[k], acc[r][c]);
        }
      }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < columns; ++c) store(out + r * out_stride + 16 * c, acc[r][c]);
  }
};

#if EKV_PAIRS
template <int format> struct PairBlock;

// bf16 of small integers: exact.
alignas(64) const uint16_t kBf16OfCode4[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
    0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
    0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

template <> struct PairBlock<kQ4> {
  EKV_INLINE void load(const uint8_t* from, __m512i out[4]) {
    // The look-up reads five bits of an index: the table repeats, so the fifth does not matter.
    const __m512i table = _mm512_load_si512(kBf16OfCode4);
    const __m512i words = _mm512_loadu_si512(from);
    out[0] = _mm512_permutexvar_epi16(words, table);
    out[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
    out[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
    out[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
  }
};

struct Code8Tables {
  uint8_t low[128], high[128];
};
constexpr uint32_t bits_of_integer(int n) {
  if (n == 0) return 0;
  int exponent = 0;
  while (n >> (exponent + 1)) ++exponent;
  return (uint32_t(127 + exponent) << 23) | ((uint32_t(n) << (23 - exponent)) & 0x7fffffu);
}
constexpr Code8Tables code8_tables() {
  Code8Tables t{};
  for (int n = 0; n < 128; ++n) {
    t.low[n] = uint8_t(bits_of_integer(n) >> 16);
    t.high[n] = uint8_t(bits_of_integer(n) >> 24);
  }
  return t;
}
alignas(64) constexpr Code8Tables kBf16OfCode8 = code8_tables();

template <> struct PairBlock<kQ8> {
  EKV_INLINE void load(const uint8_t* from, __m512i out[4]) {
    const __m512i low0 = _mm512_loadu_si512(kBf16OfCode8.low);
    const __m512i low1 = _mm512_loadu_si512(kBf16OfCode8.low + 64);
    const __m512i high0 = _mm512_loadu_si512(kBf16OfCode8.high);
    const __m512i high1 = _mm512_loadu_si512(kBf16OfCode8.high + 64);
    const __m512i sign = _mm512_set1_epi8(char(0x80));
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      // The look-up ignores the top bit of an index, which is the sign.
      const __m512i codes = _mm512_loadu_si512(from + 64 * half);
      const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
      const __m512i high = _mm512_ternarylogic_epi64(_mm512_permutex2var_epi8(high0, codes, high1),
                                                     codes, sign, 0xf8); // a | (b & c)
      out[2 * half] = _mm512_unpacklo_epi8(low, high);
      out[2 * half + 1] = _mm512_unpackhi_epi8(low, high);
    }
  }
};

// Rows of `a` as bf16, two inner steps at a time.
struct PairProduct {
  typedef uint16_t Element;
  static constexpr bool in_tiles = false;

  template <int format, int rows, int columns>
  EKV_INLINE void tile(const uint16_t* a, int64_t a_stride, const uint8_t* const* b,
                       const uint8_t* const* ahead, int blocks, float* out, int64_t out_stride,
                       bool add) {
    __m512 acc[rows][columns];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < columns; ++c)
        acc[r][c] = add ? _mm512_loadu_ps(out + r * out_stride + 16 * c) : _mm512_setzero_ps();
    if constexpr (format == kBf16) {
      for (int i = 0; i < 4 * blocks; ++i) {
        __m512i row[columns];
#pragma GCC unroll 2
        for (int c = 0; c < columns; ++c) row[c] = _mm512_loadu_si512(b[c] + 64 * i);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
          const __m512i x = _mm512_set1_epi32(load_as<int>(a + r * a_stride + 2 * i));
#pragma GCC unroll 2
          for (int c = 0; c < columns; ++c)
            acc[r][c] = _mm512_dpbf16_ps(acc[r][c], (__m512bh)x, (__m512bh)row[c]);
        }
        if (ahead && i % 4 == 0)
          for (int c = 0; c < columns; ++c) fetch<format>(ahead[c] + int64_t{i} * 64);
      }
    } else
      for (int i = 0; i < blocks; ++i) {
#pragma GCC unroll 2
        for (int c = 0; c < columns; ++c) {
          __m512i block[4];
          PairBlock<format>::load(b[c] + int64_t{i} * block_bytes(format), block);
          if (ahead) fetch<format>(ahead[c] + int64_t{i} * block_bytes(format));
#pragma GCC unroll 4
          for (int k = 0; k < 4; ++k)
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r)
              acc[r][c] = _mm512_dpbf16_ps(
                  acc[r][c],
                  (__m512bh)_mm512_set1_epi32(load_as<int>(a + r * a_stride + 8 * i + 2 * k)),
                  (__m512bh)block[k]);
        }
      }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < columns; ++c) _mm512_storeu_ps(out + r * out_stride + 16 * c, acc[r][c]);
  }
};
#endif

template <class P, int format, int columns, int rows = kRows>
static void rows_of_tile(const typename P::Element* a, int64_t a_stride, int count,
                         const uint8_t* const* b, const uint8_t* const* ahead, int blocks,
                         float* out, int64_t out_stride, bool add) {
  for (; count >= rows;
       count -= rows, a += rows * a_stride, out += rows * out_stride, ahead = nullptr)
    P::template tile<format, rows, columns>(a, a_stride, b, ahead, blocks, out, out_stride, add);
  if constexpr (rows > 1)
    if (count > 0)
      rows_of_tile<P, format, columns, rows - 1>(a, a_stride, count, b, ahead, blocks, out,
                                                 out_stride, add);
}

// The right side: columns in blocks of 16, with a pointer for each to `blocks` blocks in a row; and
// where what is read next lies, of the same shape, or null.
struct Columns {
  const uint8_t* const* from;
  const uint8_t* const* ahead;
  int count, blocks;
};

template <class P, int format> static void product(const typename P::Element* a, int64_t a_stride,
                                                   int rows, const Columns& b, float* out,
                                                   int64_t out_stride, bool add) {
  if constexpr (P::in_tiles) {
    P::run(a, a_stride, rows, b, out, out_stride, add);
  } else {
    int c = 0;
    for (; c + kColumns <= b.count; c += kColumns)
      rows_of_tile<P, format, kColumns>(a, a_stride, rows, b.from + c,
                                        b.ahead ? b.ahead + c : nullptr, b.blocks, out + 16 * c,
                                        out_stride, add);
    for (; c < b.count; ++c)
      rows_of_tile<P, format, 1>(a, a_stride, rows, b.from + c, b.ahead ? b.ahead + c : nullptr,
                                 b.blocks, out + 16 * c, out_stride, add);
  }
}

} // namespace

// SPDX-License-Identifier: Apache-2.0
// Intel AMX: the product of attention in tiles of 16 rows x 16 columns x 32 inner steps. With
// EKV_EMULATE_AMX the same code runs on plain arrays, which is how it is tested without such a CPU.
#pragma once

#include "product.h"

#ifdef EKV_EMULATE_AMX
#include "tiles_emulated.h"
#else
// Some compilers' _tile_loadconfig says that it reads 8 bytes: the rest must not look unused.
#define EKV_TILE_CONFIG(config)                                                                    \
  do {                                                                                             \
    __asm__ volatile("" : : "r"(config) : "memory");                                               \
    _tile_loadconfig(config);                                                                      \
  } while (0)
#define EKV_TILE_ZERO(t) _tile_zero(t)
#define EKV_TILE_LOAD(t, from, stride) _tile_loadd(t, from, stride)
#define EKV_TILE_STORE(t, to, stride) _tile_stored(t, to, stride)
#define EKV_TILE_PRODUCT(c, a, b) _tile_dpbf16ps(c, a, b)
#define EKV_TILE_RELEASE() _tile_release()
#endif

namespace {

struct alignas(64) TileConfig {
  uint8_t palette, start;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Tiles 0 and 1 are results, 2 the left side, 3 and 4 the right one; 5, 6 and 7 the same sides for
// the last inner steps, if there are fewer than 32 of them: a tile with rows but no columns, or the
// other way round, is an error to the CPU.
static void configure_tiles(int last_blocks) {
  TileConfig config{};
  config.palette = 1;
  const auto set = [&](int tile, int rows, int bytes) {
    config.rows[tile] = uint8_t(rows);
    config.row_bytes[tile] = uint16_t(bytes);
  };
  for (int tile = 0; tile < 5; ++tile) set(tile, 16, 64);
  if (last_blocks > 0) {
    set(5, 16, 16 * last_blocks);
    set(6, 4 * last_blocks, 64);
    set(7, 4 * last_blocks, 64);
  }
  EKV_TILE_CONFIG(&config);
}

struct TileProduct {
  typedef uint16_t Element;
  static constexpr bool in_tiles = true;
  static constexpr int rows = 16, columns = 2, blocks = 4; // of a tile; blocks of 8 inner steps

  // Up to 16 rows and `n` (1 or 2) columns of `out`. Rows behind `count` of `a` may hold anything:
  // a row of the result depends on its own row alone.
  template <int n> EKV_INLINE void tile(const uint16_t* a, int64_t a_stride, int count,
                                        const uint8_t* const* b, int all, float* out,
                                        int64_t out_stride, bool add) {
    alignas(64) float result[n][rows * 16];
    if (add) {
      for (int c = 0; c < n; ++c) copy(result[c], 16, out + 16 * c, out_stride, count);
      EKV_TILE_LOAD(0, result[0], 64);
      if (n > 1) EKV_TILE_LOAD(1, result[n - 1], 64);
    } else {
      EKV_TILE_ZERO(0);
      if (n > 1) EKV_TILE_ZERO(1);
    }
    const int64_t stride = 2 * a_stride;
    int i = 0;
    for (; i + blocks <= all; i += blocks) {
      EKV_TILE_LOAD(2, a + 8 * i, stride);
      EKV_TILE_LOAD(3, b[0] + 256 * i, 64);
      EKV_TILE_PRODUCT(0, 2, 3);
      if (n > 1) {
        EKV_TILE_LOAD(4, b[n - 1] + 256 * i, 64);
        EKV_TILE_PRODUCT(1, 2, 4);
      }
    }
    if (i < all) {
      EKV_TILE_LOAD(5, a + 8 * i, stride);
      EKV_TILE_LOAD(6, b[0] + 256 * i, 64);
      EKV_TILE_PRODUCT(0, 5, 6);
      if (n > 1) {
        EKV_TILE_LOAD(7, b[n - 1] + 256 * i, 64);
        EKV_TILE_PRODUCT(1, 5, 7);
      }
    }
    EKV_TILE_STORE(0, result[0], 64);
    if (n > 1) EKV_TILE_STORE(1, result[n - 1], 64);
    for (int c = 0; c < n; ++c) copy(out + 16 * c, out_stride, result[c], 16, count);
  }

  EKV_INLINE void copy(float* to, int64_t to_stride, const float* from, int64_t from_stride,
                       int count) {
    for (int r = 0; r < count; ++r) store(to + r * to_stride, load(from + r * from_stride));
  }

  static void run(const uint16_t* a, int64_t a_stride, int count, const Columns& b, float* out,
                  int64_t out_stride, bool add) {
    if (b.ahead)
      for (int c = 0; c < b.count; ++c)
        for (int i = 0; i < b.blocks; ++i) fetch<kBf16>(b.ahead[c] + 256 * i);
    configure_tiles(b.blocks % blocks);
    for (int r = 0; r < count; r += rows) {
      const int left = count - r < rows ? count - r : rows;
      int c = 0;
      for (; c + 2 <= b.count; c += 2)
        tile<2>(a + r * a_stride, a_stride, left, b.from + c, b.blocks,
                out + r * out_stride + 16 * c, out_stride, add);
      if (c < b.count)
        tile<1>(a + r * a_stride, a_stride, left, b.from + c, b.blocks,
                out + r * out_stride + 16 * c, out_stride, add);
    }
    EKV_TILE_RELEASE();
  }
};

} // namespace

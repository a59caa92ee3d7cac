// SPDX-License-Identifier: Apache-2.0
// AMX's tile registers as arrays, with the meaning and the order of additions of Intel's manual.
#pragma once

#include <stdint.h>
#include <string.h>

namespace {

struct EmulatedTiles {
  uint8_t data[8][16][64];
  uint8_t config[64];
  bool fault; // of the last configuration
  int rows(int t) const { return config[48 + t]; }
  int bytes(int t) const { return config[16 + 2 * t] | config[17 + 2 * t] << 8; }
};
static thread_local EmulatedTiles emulated;

// A tile with rows but no columns, or the other way round, or too many, is a fault of LDTILECFG.
// Here it makes results NaN, so that a test fails and does not crash.
static void emulate_config(const void* from) {
  memset(emulated.data, 0, sizeof emulated.data);
  memcpy(emulated.config, from, 64);
  emulated.fault = false;
  for (int t = 0; t < 8; ++t) {
    const int rows = emulated.rows(t), bytes = emulated.bytes(t);
    if ((rows == 0) != (bytes == 0) || rows > 16 || bytes > 64) emulated.fault = true;
  }
}

static void emulate_load(int t, const void* from, int64_t stride) {
  memset(emulated.data[t], 0, sizeof emulated.data[t]);
  for (int r = 0; r < emulated.rows(t); ++r)
    memcpy(emulated.data[t][r], static_cast<const uint8_t*>(from) + r * stride, emulated.bytes(t));
}

static void emulate_store(int t, void* to, int64_t stride) {
  for (int r = 0; r < emulated.rows(t); ++r)
    if (emulated.fault)
      memset(static_cast<uint8_t*>(to) + r * stride, 0xff, emulated.bytes(t));
    else
      memcpy(static_cast<uint8_t*>(to) + r * stride, emulated.data[t][r], emulated.bytes(t));
}

static float emulated_bf16(const uint8_t* from) {
  uint16_t half;
  memcpy(&half, from, 2);
  const uint32_t bits = uint32_t{half} << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static void emulate_product(int c, int a, int b) {
  for (int m = 0; m < emulated.rows(c); ++m)
    for (int n = 0; n < emulated.bytes(c) / 4; ++n) {
      float even = 0, odd = 0, total;
      for (int k = 0; k < emulated.bytes(a) / 4; ++k) {
        const uint8_t *x = emulated.data[a][m] + 4 * k, *y = emulated.data[b][k] + 4 * n;
        even += emulated_bf16(x) * emulated_bf16(y);
        odd += emulated_bf16(x + 2) * emulated_bf16(y + 2);
      }
      memcpy(&total, emulated.data[c][m] + 4 * n, 4);
      total += even + odd;
      memcpy(emulated.data[c][m] + 4 * n, &total, 4);
    }
}

} // namespace

#define EKV_TILE_CONFIG(from) emulate_config(from)
#define EKV_TILE_ZERO(t) memset(emulated.data[t], 0, 1024)
#define EKV_TILE_LOAD(t, from, stride) emulate_load(t, from, stride)
#define EKV_TILE_STORE(t, to, stride) emulate_store(t, to, stride)
#define EKV_TILE_PRODUCT(c, a, b) emulate_product(c, a, b)
#define EKV_TILE_RELEASE() memset(emulated.config, 0, 64)

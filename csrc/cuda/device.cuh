// SPDX-License-Identifier: Apache-2.0
// What kernels are written in: launches, loads of whole vectors, 16 bit floats, sums over lanes.
// The same code runs on a GPU and, for tests, in the emulation of one.
#pragma once

#ifdef __CUDACC__
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define EKV_LAUNCH(kernel, blocks, shared, stream, ...)                                            \
  kernel<<<dim3(unsigned(blocks)), kThreads, shared, static_cast<cudaStream_t>(stream)>>>(         \
      __VA_ARGS__)
#define EKV_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define EKV_PARAMETER const __grid_constant__
#define EKV_ALIGNED(pointer, bytes)
#define EKV_UNROLL _Pragma("unroll")
#else
#include "emulation/cuda.h"
#endif

#include "kernels.h"

namespace entropykv::cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kWarps = kThreads / 32;

// What CUDA says about a launch, null if all is well.
static inline const char* launched() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// A vector of 16 or 8 bytes at once; its address is a multiple of its size.
template <class Vector> static __device__ __forceinline__ Vector load(const void* p) {
  EKV_ALIGNED(p, sizeof(Vector));
  return *static_cast<const Vector*>(p);
}
template <class Vector> static __device__ __forceinline__ void store(void* p, Vector x) {
  EKV_ALIGNED(p, sizeof(Vector));
  *static_cast<Vector*>(p) = x;
}

static __device__ __forceinline__ float float_of_half(unsigned bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
static __device__ __forceinline__ unsigned half_of_float(float x) {
  return __half_as_ushort(__float2half_rn(x));
}
static __device__ __forceinline__ float float_of_bfloat(unsigned bits) {
  return __uint_as_float(bits << 16);
}
// To the nearest, of two the even one; NaN becomes torch's.
static __device__ __forceinline__ unsigned bfloat_of_float(float x) {
  const unsigned bits = __float_as_uint(x);
  if (x != x) return 0x7FC0;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// The lanes that share a token's row, eight channels each: a power of two, so that a warp is a
// whole number of rows. Some may have nothing to do.
struct Lanes {
  int count, unit, row, rows; // unit: of eight channels, row of this thread and rows of the block
  bool busy;

  __device__ explicit Lanes(int head_size) {
    count = 2;
    while (count * 8 < head_size) count *= 2;
    unit = int(threadIdx.x) % count;
    row = int(threadIdx.x) / count;
    rows = kThreads / count;
    busy = unit * 8 < head_size;
  }
};

// Over the lanes of a row; each gets the result, in the same order of additions.
template <class T> static __device__ __forceinline__ T row_sum(T x, const Lanes& lanes) {
  for (int step = lanes.count / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
static __device__ __forceinline__ float row_min(float x, const Lanes& lanes) {
  for (int step = lanes.count / 2; step > 0; step /= 2)
    x = fminf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}
static __device__ __forceinline__ float row_max(float x, const Lanes& lanes) {
  for (int step = lanes.count / 2; step > 0; step /= 2)
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

template <class T> static __device__ __forceinline__ T warp_sum(T x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// Over the block; `shared` has room for a number of each warp, and is free afterwards.
template <class T> static __device__ __forceinline__ T block_sum(T x, T* shared) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  T total = 0;
  for (int warp = 0; warp < kWarps; ++warp) total += shared[warp];
  __syncthreads();
  return total;
}

// Layer, move and head of a row.
struct Row {
  int layer, move, head;
  __device__ Row(const Moves& m, int64_t row) {
    head = int(row % m.pages.heads);
    move = int(row / m.pages.heads % m.moves);
    layer = int(row / m.pages.heads / m.moves);
  }
};

static __device__ __forceinline__ uint8_t* head_of(const Moves& m, const Row& row, int64_t page) {
  return m.pages.cache[row.layer] + page * m.pages.page_bytes + row.head * m.pages.head_bytes;
}

// The head's bytes of page i of those that a row's move reads, or writes.
static __device__ __forceinline__ const uint8_t* source(const Moves& m, const Row& row, int i) {
  return head_of(m, row, m.src[int64_t{row.move} * m.from + i]);
}
static __device__ __forceinline__ uint8_t* target(const Moves& m, const Row& row, int i) {
  return head_of(m, row, m.dst[int64_t{row.move} * m.into + i]);
}

// Which unit of a row is the i-th of those that stay.
static __device__ __forceinline__ int kept_unit(const Moves& m, int64_t row, int i) {
  if (!m.best) return i;
  return m.best[(m.by_layer ? row / m.pages.heads : row) * (m.keep() / m.run) + i];
}
static __device__ __forceinline__ int kept_token(const Moves& m, int64_t row, int i) {
  if (m.run == 1) return kept_unit(m, row, i);
  return kept_unit(m, row, i / m.run) * m.run + i % m.run;
}

// Where the i-th page that a row's move writes is made.
static __device__ __forceinline__ uint8_t* made(const Moves& m, const Row& row, int64_t at, int i) {
  return m.apart ? target(m, row, i) : m.packed + (at * m.into + i) * m.used;
}

} // namespace entropykv::cuda

// SPDX-License-Identifier: Apache-2.0
// As much of CUDA as the kernels use, for a C++ compiler: blocks run one after another in random
// order, and a block's threads in random order from barrier to barrier, each with a stack of its
// own. So a missing barrier gives other results for other seeds. What it does not show: races of
// threads that are between the same barriers, and anything about speed.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <functional>

#define __global__
#define __device__
#define __forceinline__ inline

#define EKV_LAUNCH(kernel, blocks, shared, stream, ...)                                            \
  emulation::launch(blocks, kThreads, shared, [=] { kernel(__VA_ARGS__); })
#define EKV_SHARED(name) unsigned char* name = emulation::shared_memory()
#define EKV_PARAMETER const
#define EKV_ALIGNED(pointer, bytes) emulation::check_alignment(pointer, bytes)
#define EKV_UNROLL

namespace emulation {

struct Index {
  unsigned x;
};
struct Place {
  Index thread, block;
};

// Runs all threads of a kernel. Raises std::runtime_error where they hang, leave a barrier that
// others wait at, write beyond their shared memory, or load vectors from odd addresses; and where a
// GPU would refuse the launch: no blocks or too many, or more shared memory than there is unasked.
void launch(int64_t blocks, int threads, size_t shared, const std::function<void()>& kernel);

const Place& place();
unsigned char* shared_memory();
void check_alignment(const void* pointer, size_t bytes);

// Waits for all threads of the block.
void block_barrier();
// Gives the lanes of the warp a number each; returns those of all 32, valid up to the next call.
const uint64_t* exchange(uint64_t x);

template <class T> T from_lane(T x, unsigned lane) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &x, sizeof(T));
  const uint64_t found = exchange(bits)[lane % 32];
  memcpy(&x, &found, sizeof(T));
  return x;
}

inline unsigned lane() {
  return place().thread.x % 32;
}

} // namespace emulation

// Of the next launches.
extern "C" void emulation_seed(uint64_t seed);

#define threadIdx emulation::place().thread
#define blockIdx emulation::place().block

inline void __syncthreads() {
  emulation::block_barrier();
}
template <class T> T __shfl_sync(unsigned, T x, int lane) {
  return emulation::from_lane(x, unsigned(lane));
}
template <class T> T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulation::from_lane(x, emulation::lane() ^ unsigned(mask));
}
template <class T> T __shfl_up_sync(unsigned, T x, unsigned step) {
  const unsigned own = emulation::lane();
  return emulation::from_lane(x, own < step ? own : own - step);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const uint64_t* lanes = emulation::exchange(x);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= unsigned(lanes[i] != 0) << i;
  return bits;
}
inline unsigned __popc(unsigned x) {
  return unsigned(__builtin_popcount(x));
}
inline unsigned atomicAdd(unsigned* p, unsigned x) {
  const unsigned before = *p;
  *p += x;
  return before;
}

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline _Float16 __ushort_as_half(unsigned short bits) {
  _Float16 x;
  memcpy(&x, &bits, 2);
  return x;
}
inline unsigned short __half_as_ushort(_Float16 x) {
  unsigned short bits;
  memcpy(&bits, &x, 2);
  return bits;
}
inline float __half2float(_Float16 x) {
  return float(x);
}
inline _Float16 __float2half_rn(float x) {
  return _Float16(x);
}

using std::max;
using std::min;

// Launches raise what goes wrong, so there is nothing to ask for.
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) {
  return "";
}

// SPDX-License-Identifier: Apache-2.0
// Kernels with mistakes that the emulation must notice.
#include "../../csrc/cuda/emulation/cuda.h"

#include <stdexcept>
#include <string>

namespace {

constexpr int kThreads = 64;

template <bool waits> void reverse(int* out) {
  EKV_SHARED(memory);
  auto* numbers = reinterpret_cast<int*>(memory);
  const int i = threadIdx.x;
  numbers[i] = i;
  if (waits) __syncthreads();
  out[i] = numbers[kThreads - 1 - i];
}

// Each block adds to what the one before it has left.
void chain(int* out) {
  if (threadIdx.x == 0 && blockIdx.x > 0) out[blockIdx.x] = out[blockIdx.x - 1] + 1;
}

void hang(int*) {
  if (threadIdx.x % 2) __syncthreads();
  __shfl_sync(~0u, 0, 0);
}

void leave(int*) {
  if (threadIdx.x % 2) __shfl_sync(~0u, 0, 0);
}

void overrun(int*) {
  EKV_SHARED(memory);
  memory[threadIdx.x * sizeof(int) + 1] = 0;
  if (threadIdx.x == 0) memory[kThreads * sizeof(int)] = 0;
}

void misalign(int* out) {
  EKV_ALIGNED(reinterpret_cast<unsigned char*>(out) + 4, 16);
}

std::string message;

} // namespace

// What goes wrong, or nothing.
extern "C" const char* run(const char* name, int blocks, int shared, int* out) {
  const std::string wanted = name;
  auto* kernel = wanted == "reverse"             ? reverse<true>
                 : wanted == "forgets a barrier" ? reverse<false>
                 : wanted == "chain"             ? chain
                 : wanted == "hang"              ? hang
                 : wanted == "leave"             ? leave
                 : wanted == "overrun"           ? overrun
                                                 : misalign;
  try {
    EKV_LAUNCH(kernel, blocks, size_t(shared), nullptr, out);
    return "";
  } catch (const std::runtime_error& error) {
    message = error.what();
    return message.c_str();
  }
}

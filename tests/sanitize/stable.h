// SPDX-License-Identifier: Apache-2.0
// What of torch the operators use, without torch: they need nothing but its stable ABI, some forty
// functions of C. So any compiler's sanitizers can watch them, and each tensor ends where its
// memory does.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <map>
#include <string>
#include <vector>

namespace stable {

struct Tensor {
  int32_t type; // of torch::headeronly::ScalarType
  std::vector<int64_t> sizes, strides;
  void* data;
};

size_t item_bytes(int32_t type);

typedef void (*Operator)(StableIValue*, uint64_t, uint64_t);

// Those that were registered, by name.
std::map<std::string, Operator>& operators();

extern uint32_t threads; // what the operators are told that there are
extern bool beside;      // whether there really are as many

} // namespace stable

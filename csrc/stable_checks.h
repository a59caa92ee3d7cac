// SPDX-License-Identifier: Apache-2.0
// What the operators of CPUs and those of GPUs check alike, over torch's stable ABI.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <map>
#include <string>

#include "page_format.h"
#include "policies.h"

namespace entropykv {

inline int type_of(const torch::stable::Tensor& t) {
  using torch::headeronly::ScalarType;
  switch (t.scalar_type()) {
  case ScalarType::Float: return kFloat32;
  case ScalarType::BFloat16: return kBFloat16;
  case ScalarType::Half: return kFloat16;
  default: STD_TORCH_CHECK(false, "entropykv: tensors must be float32, bfloat16 or float16");
  }
}

// Whether the step from head to head, dimension 1, is that many elements. The stride of a dimension
// of one is any number.
inline bool heads_are_apart(const torch::stable::Tensor& t, int64_t elements) {
  return t.size(1) == 1 || t.stride(1) == elements;
}

inline int policy_of(const std::string& name) {
  static const std::map<std::string, int> names = {
      {"entropykv", kEntropykv}, {"norm", kNorm},     {"knorm", kKnorm},    {"keydiff", kKeydiff},
      {"random", kRandom},       {"sink", kPosition}, {"window", kPosition}};
  const auto found = names.find(name);
  STD_TORCH_CHECK(found != names.end(), "entropykv: unknown policy ", name);
  return found->second;
}

// Of a cache that the kernels can work on, whose cold pages have that many bits.
inline Geometry geometry_of(const torch::stable::Tensor& t, int64_t bits) {
  STD_TORCH_CHECK(
      t.dim() == 4 && t.stride(3) == 1 && t.stride(2) == t.size(3) &&
          heads_are_apart(t, t.size(2) * t.size(3)),
      "entropykv: a cache is [pages, heads, page, 2 * head size], each page contiguous");
  STD_TORCH_CHECK(bits == 16 || bits == 8 || bits == 4,
                  "entropykv: cold pages have 16, 8 or 4 bits, not ", bits);
  Geometry g{};
  g.type = type_of(t);
  g.heads = int(t.size(1));
  g.page = int(t.size(2));
  g.head_size = int(t.size(3) / 2);
  STD_TORCH_CHECK(
      t.size(3) % 32 == 0 && g.head_size <= kMaxHead && g.page % kTile == 0,
      "entropykv: head sizes are multiples of 16 up to 256 and pages of 16 tokens, not ",
      g.head_size, " and ", g.page);
  g.head_bytes = head_bytes(g.head_size, g.page, item_bytes(g.type));
  g.page_bytes = t.stride(0) * item_bytes(g.type);
  g.bits = int(bits);
  g.cold_tokens = capacity(g.head_size, g.page, item_bytes(g.type), g.bits);
  STD_TORCH_CHECK(g.cold_tokens > 0, "entropykv: pages of ", g.page, " tokens are too small for ",
                  bits, " bits");
  return g;
}

} // namespace entropykv

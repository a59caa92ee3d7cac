// SPDX-License-Identifier: Apache-2.0
// What the operators of CPUs and those of GPUs check alike, over torch's stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <map>
#include <string>

#include "page_format.h"
#include "policies.h"

namespace entropykv {

// A string that an operator takes. torch's own conversion loses each of them: a copy on the heap.
struct Word : std::string {
  using std::string::string;
};

} // namespace entropykv

namespace torch::stable::detail {

template <> struct ToImpl<entropykv::Word> {
  static entropykv::Word call(StableIValue value, uint64_t, bool) {
    const auto handle = to<StringHandle>(value);
    const char* text;
    size_t length;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &text));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    const entropykv::Word word(text, length);
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return word;
  }
};

} // namespace torch::stable::detail

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

// Bytes from one row of dimension 0 to the next. The stride of a single row is any number.
inline int64_t step_of(const torch::stable::Tensor& t, int item) {
  return t.size(0) > 1 ? t.stride(0) * item : 0;
}

// From the first byte of a tensor to behind its last one.
struct Span {
  const uint8_t *begin, *end;
};

inline Span span_of(const torch::stable::Tensor& t) {
  const auto* begin = static_cast<const uint8_t*>(t.const_data_ptr());
  if (t.numel() == 0) return {begin, begin};
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  return {begin, begin + (last + 1) * int64_t(t.element_size())};
}

// Integers are checked before the work begins, so it must not write over them.
inline void check_apart(std::initializer_list<const torch::stable::Tensor*> integers,
                        const torch::stable::Tensor& written) {
  const Span to = span_of(written);
  for (const torch::stable::Tensor* t : integers) {
    const Span from = span_of(*t);
    STD_TORCH_CHECK(from.begin >= to.end || to.begin >= from.end,
                    "entropykv: integers lie in memory that the call writes to");
  }
}

inline int policy_of(const std::string& name) {
  static const std::map<std::string, int> names = {
      {"entropykv", kEntropykv}, {"norm", kNorm},     {"knorm", kKnorm},    {"keydiff", kKeydiff},
      {"random", kRandom},       {"sink", kPosition}, {"window", kPosition}};
  const auto found = names.find(name);
  STD_TORCH_CHECK(found != names.end(), "entropykv: unknown policy ", name);
  return found->second;
}

inline void check_sizes(int64_t head_size, int64_t page, int64_t bits) {
  STD_TORCH_CHECK(bits == 16 || bits == 8 || bits == 4,
                  "entropykv: cold pages have 16, 8 or 4 bits, not ", bits);
  STD_TORCH_CHECK(head_size > 0 && head_size % 16 == 0 && head_size <= kMaxHead && page > 0 &&
                      page % kTile == 0 && page <= kMostPage,
                  "entropykv: head sizes are multiples of 16 up to ", kMaxHead,
                  " and pages of 16 tokens up to ", kMostPage, ", not ", head_size, " and ", page);
}

// Of a cache that the kernels can work on, whose cold pages have that many bits.
inline Geometry geometry_of(const torch::stable::Tensor& t, int64_t bits) {
  constexpr const char* kShape =
      "entropykv: a cache is [pages, heads, page, 2 * head size], each page contiguous";
  STD_TORCH_CHECK(t.dim() == 4 && t.stride(3) == 1 && t.stride(2) == t.size(3), kShape);
  STD_TORCH_CHECK(t.size(3) % 2 == 0, "entropykv: head sizes are multiples of 16, not half of ",
                  t.size(3));
  check_sizes(t.size(3) / 2, t.size(2), bits); // before they are multiplied
  STD_TORCH_CHECK(heads_are_apart(t, t.size(2) * t.size(3)), kShape);
  STD_TORCH_CHECK(t.size(1) >= 1 && t.size(1) <= kMostHeads, "entropykv: a cache has 1 to ",
                  kMostHeads, " heads, not ", t.size(1));
  Geometry g{};
  g.type = type_of(t);
  g.heads = int(t.size(1));
  g.page = int(t.size(2));
  g.head_size = int(t.size(3) / 2);
  g.head_bytes = head_bytes(g.head_size, g.page, item_bytes(g.type));
  g.page_bytes = step_of(t, item_bytes(g.type));
  g.bits = int(bits);
  g.cold_tokens = capacity(g.head_size, g.page, item_bytes(g.type), g.bits);
  STD_TORCH_CHECK(g.cold_tokens > 0, "entropykv: pages of ", g.page, " tokens are too small for ",
                  bits, " bits");
  return g;
}

} // namespace entropykv

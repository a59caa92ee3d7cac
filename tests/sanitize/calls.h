// SPDX-License-Identifier: Apache-2.0
// Calls of the operators that are right, with random sizes and numbers; and what carries one out.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "../../csrc/page_format.h"
#include "stable.h"

namespace calls {

using torch::headeronly::ScalarType;

// A number from the first one to the second.
typedef std::function<int64_t(int64_t, int64_t)> Pick;

// A tensor that has no memory yet.
struct Tensor {
  ScalarType type;
  std::vector<int64_t> sizes, strides;
  std::vector<int64_t> integers; // what it holds, if it holds such
  int64_t offset = 0;            // items that lie before it in its memory
  int inside = -1;               // the argument whose memory it lies in

  bool whole() const { return type == ScalarType::Int || type == ScalarType::Long; }
};

struct None {};
typedef std::variant<Tensor, int64_t, double, std::string, None> Value;

struct Argument {
  Value value;
  bool optional = false;
};
typedef std::vector<Argument> Arguments;

inline std::vector<int64_t> strides_of(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;)
    strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  return strides;
}

inline Argument floats(ScalarType type, std::vector<int64_t> sizes) {
  return {Tensor{type, sizes, strides_of(sizes), {}}};
}

inline Argument integers(ScalarType type, std::vector<int64_t> sizes, std::vector<int64_t> held) {
  return {Tensor{type, sizes, strides_of(sizes), held}};
}

// Rows that are a part of longer ones, as of a fused QKV.
inline Argument wide(Argument a, const Pick& pick) {
  Tensor& t = std::get<Tensor>(a.value);
  if (pick(0, 1)) t.strides[0] *= 2;
  return a;
}

inline Argument maybe(Argument a, const Pick& pick) {
  a.optional = true;
  if (pick(0, 1)) a.value = None{};
  return a;
}

inline Argument one_of(std::vector<const char*> names, const Pick& pick) {
  return {std::string(names[pick(0, int64_t(names.size()) - 1)])};
}

inline ScalarType float_type(const Pick& pick) {
  constexpr ScalarType types[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
  return types[pick(0, 2)];
}

// A cache, and the numbers that go with it.
struct Pages {
  int64_t count, heads, page, head_size, bits;
  ScalarType type;

  explicit Pages(const Pick& pick)
      : count(pick(1, 3)), heads(pick(1, 2)), page(16 * pick(1, 2)),
        head_size(pick(0, 15) ? 16 * pick(1, 3) : 256), bits(16 >> pick(0, 2)),
        type(float_type(pick)) {}

  int item() const { return type == ScalarType::Float ? 4 : 2; }
  int64_t cold_tokens() const {
    return entropykv::capacity(int(head_size), int(page), item(), int(bits));
  }
  Argument tensor(const Pick& pick) const {
    return wide(floats(type, {count, heads, page, 2 * head_size}), pick);
  }
  Argument slots(const Pick& pick) const {
    const int64_t used = std::max(page, cold_tokens());
    return wide(floats(ScalarType::Float, {count, heads, used + pick(0, 3)}), pick);
  }
};

inline Arguments write(const Pick& pick) {
  const Pages pages(pick);
  const int64_t tokens = pick(0, 6);
  const ScalarType type = float_type(pick);
  std::vector<int64_t> slots(tokens);
  for (int64_t& slot : slots) slot = pick(-1, pages.count * pages.page - 1);
  const auto rows = [&] {
    return wide(floats(type, {tokens + pick(0, 1), pages.heads, pages.head_size}), pick);
  };
  return {rows(), rows(), pages.tensor(pick), integers(ScalarType::Long, {tokens}, slots)};
}

// Attention over some requests, behind whose arguments come those of `observe`.
inline Arguments requests(const Pick& pick, bool observe) {
  const Pages pages(pick);
  const int64_t count = pick(0, 3), group = pick(1, 4);
  std::vector<int64_t> starts{pick(0, 1)}, cold, hot, table, held, first, fresh;
  for (int64_t r = 0; r < count; ++r) {
    cold.push_back(pick(0, 2)), hot.push_back(pick(0, 40));
    starts.push_back(starts.back() + pick(0, std::min<int64_t>(hot[r], 20)));
    held.push_back(cold[r] + (hot[r] + pages.page - 1) / pages.page);
    first.push_back(pick(-1, 3)), fresh.push_back(pick(0, 1));
  }
  const int64_t width = held.empty() ? 1 : *std::max_element(held.begin(), held.end()) + pick(0, 1);
  for (int64_t i = 0; i < count * width; ++i)
    table.push_back(i % width < held[i / width] ? pick(0, pages.count - 1) : pick(-9, 9));
  const std::vector<int64_t> rows{starts.back() + pick(0, 2), pages.heads * group, pages.head_size};
  const Argument query = wide(floats(float_type(pick), rows), pick);
  const auto ints = [](std::vector<int64_t> held) {
    return integers(ScalarType::Int, {int64_t(held.size())}, held);
  };
  Arguments all{query, pages.tensor(pick)};
  all.push_back(observe ? pages.slots(pick) : wide(floats(float_type(pick), rows), pick));
  for (const Argument& a :
       {ints(starts), integers(ScalarType::Int, {count, width}, table), ints(cold), ints(hot),
        Argument{pages.bits}, Argument{0.25}, Argument{pick(0, 1) ? 30.0 : 0.0},
        maybe(floats(ScalarType::Float, {pages.heads * group}), pick)})
    all.push_back(a);
  if (observe) all.push_back(ints(first)), all.push_back(ints(fresh));
  return all;
}

inline Arguments attention(const Pick& pick) {
  return requests(pick, false);
}
inline Arguments observe(const Pick& pick) {
  return requests(pick, true);
}

// Moves of hot pages, or of cold ones, behind whose cache come the words of `collapse`.
inline Arguments moves(const Pick& pick, bool collapse) {
  const Pages pages(pick);
  const bool from_hot = collapse && pick(0, 3);
  const int64_t count = pick(0, 3), from = pick(1, 8),
                cold = std::max<int64_t>(pages.cold_tokens(), 1);
  const int64_t tokens = from * (from_hot || pages.bits == 16 ? pages.page : cold);
  const int64_t into = pick(1, std::clamp<int64_t>(tokens / cold, 1, from));
  const auto of_each = [&](int64_t n, int64_t low, int64_t high) {
    std::vector<int64_t> held(count * n);
    for (int64_t& number : held) number = pick(low, high);
    return held;
  };
  Arguments all{pages.tensor(pick)};
  for (const int64_t n : {from, into})
    all.push_back(integers(ScalarType::Long, {count, n}, of_each(n, 0, pages.count - 1)));
  all.push_back(integers(ScalarType::Long, {count}, of_each(1, -1, 40)));
  all.push_back(
      one_of({"entropykv", "norm", "knorm", "keydiff", "random", "sink", "window"}, pick));
  if (collapse) {
    all.push_back(one_of({"token", "block"}, pick)), all.push_back(one_of({"head", "layer"}, pick));
    all.push_back({from_hot ? int64_t{16} : pages.bits});
  }
  all.push_back({pages.bits});
  all.push_back(maybe(floats(ScalarType::Float, {count, pages.heads, tokens}), pick));
  all.push_back(maybe(pages.slots(pick), pick));
  return all;
}

inline Arguments collapse(const Pick& pick) {
  return moves(pick, true);
}
inline Arguments drop(const Pick& pick) {
  return moves(pick, false);
}

inline Arguments capacity(const Pick& pick) {
  return {{16 * pick(1, 16)}, {16 * pick(1, 64)}, {2 * pick(1, 2)}, {int64_t{16} >> pick(0, 2)}};
}

struct Kind {
  const char* name;
  Arguments (*right)(const Pick&);
};
constexpr Kind kKinds[] = {{"write", write},     {"attention", attention},
                           {"observe", observe}, {"collapse", collapse},
                           {"drop", drop},       {"capacity", capacity}};
constexpr int kCount = sizeof kKinds / sizeof *kKinds;

// -- memory --

constexpr __int128 kMostBytes = 16 << 20;

// Bytes from a tensor's memory's begin to behind the last item; more than kMostBytes is any number,
// and what torch has no tensor for, since its numbers cannot be counted.
inline int64_t bytes_of(const Tensor& t) {
  if (std::count(t.sizes.begin(), t.sizes.end(), 0)) return 0;
  __int128 last = t.offset, numbers = 1;
  for (size_t i = 0; i < t.sizes.size(); ++i) {
    numbers *= t.sizes[i];
    if (numbers > INT64_MAX) return int64_t(kMostBytes) + 1;
    last = std::min(last + __int128(t.sizes[i] - 1) * t.strides[i], kMostBytes);
  }
  return int64_t(last + 1) * int64_t(stable::item_bytes(int32_t(t.type)));
}

// What is freed with it is as long as the tensor: a byte more or less is seen.
typedef std::unique_ptr<void, void (*)(void*)> Memory;

// The integers of a tensor, as many as there is room for.
inline void put(const Tensor& t, uint8_t* to) {
  const int64_t item = int64_t(stable::item_bytes(int32_t(t.type)));
  const int64_t room = bytes_of(t) / item - t.offset;
  for (int64_t i = 0; i < std::min<int64_t>(room, int64_t(t.integers.size())); ++i) {
    const auto number = int32_t(std::clamp<int64_t>(t.integers[i], INT32_MIN, INT32_MAX));
    memcpy(to + item * i, item == 4 ? static_cast<const void*>(&number) : &t.integers[i], item);
  }
}

// Arguments with their memory, as an operator takes them.
class Call {
public:
  // `fill` writes the bytes of a tensor of floats.
  Call(const Arguments& arguments, const std::function<void(uint8_t*, int64_t)>& fill) {
    for (const Argument& a : arguments) {
      const auto* t = std::get_if<Tensor>(&a.value);
      const int64_t bytes = t ? bytes_of(*t) : 0;
      memory_.emplace_back(bytes ? malloc(bytes) : nullptr, free);
      sizes_.push_back(bytes);
      if (bytes) fill(static_cast<uint8_t*>(memory_.back().get()), bytes);
    }
    for (size_t i = 0; i < arguments.size(); ++i)
      if (const auto* t = std::get_if<Tensor>(&arguments[i].value)) add(*t, i);
    for (size_t i = 0; i < arguments.size(); ++i) stack_.push_back(boxed(arguments[i], i));
  }

  // What the operator says if it refuses.
  std::optional<std::string> run(const char* name) {
    stack_.resize(std::max<size_t>(stack_.size(), 1));
    try {
      stable::operators().at(name)(stack_.data(), count_, std::string(name) == "capacity");
      return {};
    } catch (const std::runtime_error& error) {
      return error.what();
    }
  }

private:
  void add(const Tensor& t, size_t i) {
    auto* data = static_cast<uint8_t*>(memory_[i].get());
    if (t.inside >= 0 && sizes_[i] > 0 && sizes_[t.inside] >= sizes_[i])
      data = static_cast<uint8_t*>(memory_[t.inside].get());
    if (data) data += t.offset * int64_t(stable::item_bytes(int32_t(t.type)));
    if (data && t.whole()) put(t, data);
    tensors_.push_back({int32_t(t.type), t.sizes, t.strides, data});
    of_argument_.resize(i + 1, nullptr);
    of_argument_[i] = &tensors_.back();
  }

  StableIValue boxed(const Argument& a, size_t i) {
    StableIValue value = 0;
    if (std::holds_alternative<Tensor>(a.value)) value = StableIValue(of_argument_[i]);
    if (const auto* number = std::get_if<int64_t>(&a.value)) value = StableIValue(*number);
    if (const auto* number = std::get_if<double>(&a.value)) memcpy(&value, number, 8);
    if (const auto* word = std::get_if<std::string>(&a.value))
      value = StableIValue(new std::string(*word)); // the operator deletes it
    if (a.optional && !std::holds_alternative<None>(a.value))
      value = StableIValue(new StableIValue(value)); // this one, too
    ++count_;
    return value;
  }

  std::vector<Memory> memory_;
  std::vector<int64_t> sizes_;
  std::deque<stable::Tensor> tensors_;
  std::vector<stable::Tensor*> of_argument_;
  std::vector<StableIValue> stack_;
  uint64_t count_ = 0;
};

// The instruction set of the calls that follow; one that is not there changes nothing.
inline void use(const std::string& isa) {
  StableIValue stack[1] = {StableIValue(new std::string(isa))};
  stable::operators().at("use_isa")(stack, 1, 1);
}

} // namespace calls

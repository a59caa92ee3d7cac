// SPDX-License-Identifier: Apache-2.0
// The torch operators of the CPU: checks, and the work cut up for the threads. Only torch's stable
// ABI is used, so one build serves many versions of torch.
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/select.h"

namespace entropykv {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int type_of(const Tensor& t) {
  switch (t.scalar_type()) {
  case ScalarType::Float: return kFloat32;
  case ScalarType::BFloat16: return kBFloat16;
  case ScalarType::Half: return kFloat16;
  default: STD_TORCH_CHECK(false, "entropykv: tensors must be float32, bfloat16 or float16");
  }
}

template <class T>
const T* integers(const Tensor& t, ScalarType type, int64_t dim, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == type && t.dim() == dim && t.is_contiguous(),
                  "entropykv: ", name, " must be contiguous, of ", dim,
                  " dimensions and its integer type");
  return static_cast<const T*>(t.const_data_ptr());
}

Cache cache_of(const Tensor& t, int64_t bits) {
  STD_TORCH_CHECK(
      t.dim() == 4 && t.stride(3) == 1 && t.stride(2) == t.size(3) &&
          t.stride(1) == t.size(2) * t.size(3),
      "entropykv: a cache is [pages, heads, page, 2 * head size], each page contiguous");
  STD_TORCH_CHECK(bits == 16 || bits == 8 || bits == 4,
                  "entropykv: cold pages have 16, 8 or 4 bits, not ", bits);
  Cache c{};
  c.data = static_cast<uint8_t*>(t.mutable_data_ptr());
  c.type = type_of(t);
  c.heads = int(t.size(1));
  c.page = int(t.size(2));
  c.head_size = int(t.size(3) / 2);
  STD_TORCH_CHECK(
      c.head_size % 16 == 0 && c.head_size <= kMaxHead && c.page % kTile == 0,
      "entropykv: head sizes are multiples of 16 up to 256 and pages of 16 tokens, not ",
      c.head_size, " and ", c.page);
  c.head_bytes = head_bytes(c.head_size, c.page, item_bytes(c.type));
  c.page_bytes = t.stride(0) * item_bytes(c.type);
  c.bits = int(bits);
  c.cold_tokens = capacity(c.head_size, c.page, item_bytes(c.type), c.bits);
  STD_TORCH_CHECK(c.cold_tokens > 0, "entropykv: pages of ", c.page, " tokens are too small for ",
                  bits, " bits");
  return c;
}

// Run f(i) for i in [0, count), by whichever thread is free.
template <class F> void for_each(int64_t count, const F& f) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), count);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1)) < count;) f(i);
  });
}

// Memory of a thread that lives as long as it, aligned to a cache line.
struct Arena {
  std::vector<uint8_t> bytes;
  uint8_t* get(size_t size) {
    if (bytes.size() < size + 64) bytes.resize(size + 64);
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) &
                                      ~uintptr_t{63});
  }
};
thread_local Arena scratch_arena, partial_arena;

// -- write --

void write(const Tensor& key, const Tensor& value, const Tensor& cache, const Tensor& slots) {
  const Cache c = cache_of(cache, 16);
  const int type = type_of(key);
  for (const Tensor* t : {&key, &value})
    STD_TORCH_CHECK(
        t->dim() == 3 && t->size(1) == c.heads && t->size(2) == c.head_size && t->stride(2) == 1 &&
            t->stride(1) == c.head_size && type_of(*t) == type,
        "entropykv: keys and values are [tokens, heads, head size], heads side by side");
  const int64_t* where = integers<int64_t>(slots, ScalarType::Long, 1, "slots");
  const int64_t tokens = slots.numel(), end = cache.size(0) * c.page;
  STD_TORCH_CHECK(key.size(0) >= tokens && value.size(0) >= tokens,
                  "entropykv: more slots than tokens");
  for (int64_t i = 0; i < tokens; ++i)
    STD_TORCH_CHECK(where[i] < end, "entropykv: slot ", where[i], " is outside the cache");
  const auto* k = static_cast<const uint8_t*>(key.const_data_ptr());
  const auto* v = static_cast<const uint8_t*>(value.const_data_ptr());
  const Kernels& run = kernels();
  for_each(c.heads, [&](int64_t head) {
    run.write(c, k, v, type, key.stride(0), value.stride(0), where, tokens, int(head));
  });
}

// -- attention --

struct Unit {
  Work work;
  int rows, splits;
  int64_t first_partial;
};

struct Output {
  uint8_t* data;
  int type;
  int64_t stride;
  const float* sinks;
};

size_t partial_floats(int rows, int head_size) {
  return size_t(rows) * (head_size + 2) + 16;
}

Partial partial_at(float* from, int rows, int head_size) {
  return Partial{from + size_t(rows) * head_size, from + size_t(rows) * (head_size + 1), from};
}

void finish_unit(const Attention& call, const Unit& unit, Partial total, const Output& out) {
  const int D = call.cache.head_size;
  const int64_t first = unit.work.first_row * out.stride + int64_t{unit.work.head} * call.group * D;
  kernels().finish(total, unit.rows, D, call.group,
                   out.sinks ? out.sinks + unit.work.head * call.group : nullptr,
                   out.data + first * item_bytes(out.type), out.type, out.stride);
}

void clear(Partial p, int rows, int head_size) {
  std::fill_n(p.max, rows, -__builtin_inff());
  std::fill_n(p.sum, rows, 0.0f);
  std::fill_n(p.acc, size_t(rows) * head_size, 0.0f);
}

// All splits of a unit, one after the other.
void attend_unit(const Attention& call, const Unit& unit, const Output& out) {
  const Kernels& run = kernels();
  const int D = call.cache.head_size;
  const size_t size = partial_floats(unit.rows, D);
  auto* floats = reinterpret_cast<float*>(partial_arena.get(2 * size * sizeof(float)));
  const Partial total = partial_at(floats, unit.rows, D),
                part = partial_at(floats + size, unit.rows, D);
  uint8_t* scratch = scratch_arena.get(run.scratch_bytes());
  clear(total, unit.rows, D);
  for (int split = 0; split < unit.splits; ++split) {
    Work work = unit.work;
    work.split = split;
    run.attend(call, work, part, scratch);
    run.merge(total, part, unit.rows, D);
  }
  finish_unit(call, unit, total, out);
}

// Few units leave threads idle, unless their splits are worked on at once; long contexts would need
// much memory for that, and have enough to do in each unit.
bool worth_splitting(const std::vector<Unit>& units, int head_size) {
  constexpr size_t most_floats = size_t{16} << 20;
  if (units.size() >= 4 * size_t{torch::stable::get_num_threads()}) return false;
  size_t floats = 0;
  for (const Unit& u : units) floats += partial_floats(u.rows, head_size) * (u.splits + 1);
  return floats <= most_floats;
}

// Splits of all units at once, then merged in the same order: the same numbers.
void attend_splits(const Attention& call, std::vector<Unit>& units, const Output& out) {
  const Kernels& run = kernels();
  const int D = call.cache.head_size;
  std::vector<std::pair<int, int>> jobs;
  size_t floats = 0;
  for (size_t u = 0; u < units.size(); ++u) {
    units[u].first_partial = int64_t(floats);
    floats += partial_floats(units[u].rows, D) * (units[u].splits + 1);
    for (int split = 0; split < units[u].splits; ++split) jobs.emplace_back(int(u), split);
  }
  auto* all = reinterpret_cast<float*>(partial_arena.get(floats * sizeof(float)));
  const auto at = [&](const Unit& unit, int split) {
    return partial_at(all + unit.first_partial + partial_floats(unit.rows, D) * split, unit.rows,
                      D);
  };
  for_each(int64_t(jobs.size()), [&](int64_t i) {
    const Unit& unit = units[jobs[i].first];
    Work work = unit.work;
    work.split = jobs[i].second;
    run.attend(call, work, at(unit, work.split), scratch_arena.get(run.scratch_bytes()));
  });
  for (const Unit& unit : units) {
    const Partial total = at(unit, unit.splits);
    clear(total, unit.rows, D);
    for (int split = 0; split < unit.splits; ++split)
      run.merge(total, at(unit, split), unit.rows, D);
    finish_unit(call, unit, total, out);
  }
}

std::vector<Unit> units_of(const Attention& call, const int32_t* starts, const int32_t* table,
                           int64_t width, const int32_t* cold, const int32_t* hot,
                           int64_t requests) {
  std::vector<Unit> units;
  const Cache& c = call.cache;
  const int block = std::max(1, kMaxRows / call.group);
  for (int64_t r = 0; r < requests; ++r) {
    const int queries = starts[r + 1] - starts[r];
    STD_TORCH_CHECK(queries >= 0 && queries <= hot[r] && cold[r] >= 0 &&
                        cold[r] + (hot[r] + c.page - 1) / c.page <= width,
                    "entropykv: request ", r,
                    " has more tokens than pages, or queries than hot tokens");
    for (int head = 0; head < c.heads; ++head)
      for (int first = 0; first < queries; first += block) {
        Unit u{};
        const int n = std::min(block, queries - first), position = hot[r] - queries + first;
        u.work = Work{table + r * width, cold[r], starts[r] + first, n, position, head, 0};
        u.rows = n * call.group;
        u.splits = cold_splits(c, cold[r]) + hot_splits(position + n);
        units.push_back(u);
      }
  }
  return units;
}

void check_pages(const int32_t* table, int64_t width, const int32_t* cold, const int32_t* hot,
                 int64_t requests, const Cache& c, int64_t pages) {
  for (int64_t r = 0; r < requests; ++r)
    for (int i = 0; i < cold[r] + (hot[r] + c.page - 1) / c.page; ++i)
      STD_TORCH_CHECK(table[r * width + i] >= 0 && table[r * width + i] < pages, "entropykv: page ",
                      table[r * width + i], " is outside the cache");
}

void attention(const Tensor& query, const Tensor& cache, const Tensor& output, const Tensor& starts,
               const Tensor& table, const Tensor& cold, const Tensor& hot, int64_t bits,
               double scale, double softcap, std::optional<Tensor> sinks) {
  Attention call{};
  call.cache = cache_of(cache, bits);
  const Cache& c = call.cache;
  for (const Tensor* t : {&query, &output})
    STD_TORCH_CHECK(
        t->dim() == 3 && t->size(1) % c.heads == 0 && t->size(1) == query.size(1) &&
            t->size(2) == c.head_size && t->stride(2) == 1 && t->stride(1) == c.head_size,
        "entropykv: queries and output are [tokens, query heads, head size], heads side by side");
  call.query = static_cast<const uint8_t*>(query.const_data_ptr());
  call.query_type = type_of(query);
  call.query_stride = query.stride(0);
  call.group = int(query.size(1) / c.heads);
  STD_TORCH_CHECK(call.group <= kMaxRows, "entropykv: at most ", kMaxRows,
                  " query heads share a KV head");
  call.scale = float(scale);
  call.softcap = float(softcap);
  const int64_t requests = cold.numel();
  const auto* first = integers<int32_t>(starts, ScalarType::Int, 1, "starts");
  const auto* rows = integers<int32_t>(table, ScalarType::Int, 2, "table");
  const auto* cold_pages = integers<int32_t>(cold, ScalarType::Int, 1, "cold");
  const auto* hot_tokens = integers<int32_t>(hot, ScalarType::Int, 1, "hot");
  STD_TORCH_CHECK(starts.numel() == requests + 1 && table.size(0) >= requests &&
                      hot.numel() == requests &&
                      (requests == 0 || first[requests] <= std::min(query.size(0), output.size(0))),
                  "entropykv: starts, table, cold and hot do not fit each other or the queries");
  Output out{static_cast<uint8_t*>(output.mutable_data_ptr()), type_of(output), output.stride(0),
             nullptr};
  if (sinks) {
    STD_TORCH_CHECK(sinks->scalar_type() == ScalarType::Float && sinks->numel() == query.size(1) &&
                        sinks->is_contiguous(),
                    "entropykv: sinks are float32, one for each query head");
    out.sinks = static_cast<const float*>(sinks->const_data_ptr());
  }
  auto units = units_of(call, first, rows, table.size(1), cold_pages, hot_tokens, requests);
  check_pages(rows, table.size(1), cold_pages, hot_tokens, requests, c, cache.size(0));
  if (worth_splitting(units, c.head_size)) return attend_splits(call, units, out);
  for_each(int64_t(units.size()), [&](int64_t i) { attend_unit(call, units[i], out); });
}

// -- collapse and drop --

int policy_of(const std::string& name) {
  static const std::map<std::string, int> names = {
      {"entropykv", kEntropykv}, {"norm", kNorm},     {"knorm", kKnorm},    {"keydiff", kKeydiff},
      {"random", kRandom},       {"sink", kPosition}, {"window", kPosition}};
  const auto found = names.find(name);
  STD_TORCH_CHECK(found != names.end(), "entropykv: unknown policy ", name);
  return found->second;
}

struct Moves {
  Cache cache;
  const int64_t *src, *dst, *sinks;
  int64_t count;
  int from, into; // pages of a move
  int policy;
  int run;       // tokens that stay or go together
  int from_bits; // of the pages that are read, 16 for hot ones

  int tokens() const { return from * (from_bits < 16 ? cache.cold_tokens : cache.page); }
};

Moves moves_of(const Tensor& cache, const Tensor& src, const Tensor& dst, const Tensor& sinks,
               const std::string& policy, int64_t bits) {
  Moves m{};
  m.cache = cache_of(cache, bits);
  m.src = integers<int64_t>(src, ScalarType::Long, 2, "src");
  m.dst = integers<int64_t>(dst, ScalarType::Long, 2, "dst");
  m.sinks = integers<int64_t>(sinks, ScalarType::Long, 1, "sinks");
  m.count = src.size(0);
  STD_TORCH_CHECK(
      dst.size(0) == m.count && sinks.numel() == m.count && dst.size(1) >= 1 &&
          dst.size(1) <= src.size(1),
      "entropykv: src, dst and sinks have one row per move, and a move makes pages fewer");
  m.from = int(src.size(1));
  m.into = int(dst.size(1));
  m.policy = policy_of(policy);
  m.run = 1;
  m.from_bits = 16;
  for (const Tensor* t : {&src, &dst})
    for (int64_t i = 0; i < t->numel(); ++i) {
      const int64_t page = static_cast<const int64_t*>(t->const_data_ptr())[i];
      STD_TORCH_CHECK(page >= 0 && page < cache.size(0), "entropykv: page ", page,
                      " is outside the cache");
    }
  return m;
}

// Keys, values, scores, and the survivors' keys, values and codes, of one head of one move.
struct Tokens {
  std::vector<float> keys, values, scores, kept_keys, kept_values;
  std::vector<uint8_t> codes;

  void read(const Moves& m, int64_t move, int head) {
    if (m.from_bits < 16) return read_cold(m, move, head);
    const size_t n = size_t(m.from) * m.cache.page;
    keys.resize(n * m.cache.head_size);
    values.resize(n * m.cache.head_size);
    kernels().read_hot(m.cache, m.src + move * m.from, m.from, head, keys.data(), values.data());
  }
  void read_cold(const Moves& m, int64_t move, int head) {
    const size_t page = size_t(m.cache.cold_tokens) * m.cache.head_size;
    keys.resize(page * m.from);
    values.resize(page * m.from);
    for (int i = 0; i < m.from; ++i)
      kernels().read_cold(m.cache, m.src[move * m.from + i], head, keys.data() + i * page,
                          values.data() + i * page);
  }
  void score(const Moves& m) {
    scores.resize(keys.size() / m.cache.head_size);
    kernels().score(m.policy, keys.data(), values.data(), int(scores.size()), m.cache.head_size,
                    scores.data());
  }
  void take(const std::vector<int>& best, int head_size) {
    kept_keys.resize(best.size() * head_size);
    kept_values.resize(best.size() * head_size);
    for (size_t i = 0; i < best.size(); ++i) {
      std::copy_n(keys.data() + size_t(best[i]) * head_size, head_size,
                  kept_keys.data() + i * head_size);
      std::copy_n(values.data() + size_t(best[i]) * head_size, head_size,
                  kept_values.data() + i * head_size);
    }
  }
  void write(const Moves& m, int64_t move, int head) {
    const size_t page = size_t(m.cache.cold_tokens) * m.cache.head_size;
    codes.resize(page);
    for (int i = 0; i < m.into; ++i)
      kernels().write_page(m.cache, m.dst[move * m.into + i], head, kept_keys.data() + i * page,
                           kept_values.data() + i * page, codes.data());
  }
};
thread_local Tokens tokens_of_thread;

std::vector<int> choose(const Moves& m, int64_t move, const std::vector<float>& scores) {
  const int tokens = int(scores.size()), keep = m.into * m.cache.cold_tokens;
  return best_runs(scores.data(), tokens, keep, int(std::min<int64_t>(m.sinks[move], keep)), m.run);
}

// Each head by itself. Moves go in order, so that a page freed by one may be filled by a later one.
void collapse_heads(const Moves& m) {
  for_each(m.cache.heads, [&](int64_t head) {
    Tokens& t = tokens_of_thread;
    for (int64_t move = 0; move < m.count; ++move) {
      t.read(m, move, int(head));
      t.score(m);
      t.take(choose(m, move, t.scores), m.cache.head_size);
      t.write(m, move, int(head));
    }
  });
}

// One choice for all heads: the sum of their standardized scores.
void collapse_layer(const Moves& m) {
  const int tokens = m.tokens(), heads = m.cache.heads;
  std::vector<float> all(size_t(heads) * tokens), total(tokens);
  for (int64_t move = 0; move < m.count; ++move) {
    for_each(heads, [&](int64_t head) {
      Tokens& t = tokens_of_thread;
      t.read(m, move, int(head));
      t.score(m);
      standardize(t.scores.data(), tokens);
      std::copy(t.scores.begin(), t.scores.end(), all.begin() + head * tokens);
    });
    std::fill(total.begin(), total.end(), 0.0f);
    for (int head = 0; head < heads; ++head)
      for (int i = 0; i < tokens; ++i) total[i] += all[size_t(head) * tokens + i];
    const std::vector<int> best = choose(m, move, total);
    for_each(heads, [&](int64_t head) {
      Tokens& t = tokens_of_thread;
      t.read(m, move, int(head));
      t.take(best, m.cache.head_size);
      t.write(m, move, int(head));
    });
  }
}

void collapse(const Tensor& cache, const Tensor& src, const Tensor& dst, const Tensor& sinks,
              std::string policy, std::string granularity, std::string scope, int64_t from_bits,
              int64_t bits) {
  Moves m = moves_of(cache, src, dst, sinks, policy, bits);
  STD_TORCH_CHECK(from_bits == 16 || from_bits == bits, "entropykv: pages of ", from_bits,
                  " bits cannot become pages of ", bits);
  m.from_bits = int(from_bits);
  STD_TORCH_CHECK(m.into * m.cache.cold_tokens <= m.tokens(), "entropykv: ", m.from,
                  " pages do not fill ", m.into, " cold ones");
  STD_TORCH_CHECK((granularity == "token" || granularity == "block") &&
                      (scope == "head" || scope == "layer"),
                  "entropykv: granularity is token or block and scope is head or layer");
  if (granularity == "block") m.run = int(gcd(16, m.into * m.cache.cold_tokens));
  if (scope == "head") return collapse_heads(m);
  collapse_layer(m);
}

void drop(const Tensor& cache, const Tensor& src, const Tensor& dst, const Tensor& sinks,
          std::string policy, int64_t bits) {
  Moves m = moves_of(cache, src, dst, sinks, policy, bits);
  const Cache& c = m.cache;
  m.run = c.cold_tokens;
  m.from_bits = c.bits;
  for_each(c.heads, [&](int64_t head) {
    Tokens& t = tokens_of_thread;
    std::vector<uint8_t> kept(size_t(m.into) * c.head_bytes);
    const auto at = [&](int64_t page) { return head_of(c, page, int(head)); };
    for (int64_t move = 0; move < m.count; ++move) {
      t.read(m, move, int(head));
      t.score(m);
      const std::vector<int> best = choose(m, move, t.scores);
      for (int i = 0; i < m.into; ++i)
        std::copy_n(at(m.src[move * m.from + best[size_t(i) * m.run] / m.run]), c.head_bytes,
                    kept.data() + i * c.head_bytes);
      for (int i = 0; i < m.into; ++i)
        std::copy_n(kept.data() + i * c.head_bytes, c.head_bytes, at(m.dst[move * m.into + i]));
    }
  });
}

// -- about --

bool use_isa(std::string name) {
  return set_isa(name.c_str());
}
std::string isa() {
  return kernels().name;
}
int64_t cold_capacity(int64_t head_size, int64_t page, int64_t item, int64_t bits) {
  return capacity(int(head_size), int(page), int(item), int(bits));
}

} // namespace
} // namespace entropykv

STABLE_TORCH_LIBRARY(entropykv, m) {
  m.def("write(Tensor key, Tensor value, Tensor(a!) cache, Tensor slots) -> ()");
  m.def("attention(Tensor query, Tensor cache, Tensor(a!) output, Tensor starts, Tensor table, "
        "Tensor cold, "
        "Tensor hot, int bits, float scale, float softcap, Tensor? sinks) -> ()");
  m.def("collapse(Tensor(a!) cache, Tensor src, Tensor dst, Tensor sinks, str policy, str "
        "granularity, str scope, int from_bits, int bits) -> ()");
  m.def("drop(Tensor(a!) cache, Tensor src, Tensor dst, Tensor sinks, str policy, int bits) -> ()");
  m.def("use_isa(str name) -> bool");
  m.def("isa() -> str");
  m.def("capacity(int head_size, int page, int item_bytes, int bits) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(entropykv, CPU, m) {
  m.impl("write", TORCH_BOX(&entropykv::write));
  m.impl("attention", TORCH_BOX(&entropykv::attention));
  m.impl("collapse", TORCH_BOX(&entropykv::collapse));
  m.impl("drop", TORCH_BOX(&entropykv::drop));
}

STABLE_TORCH_LIBRARY_IMPL(entropykv, CompositeExplicitAutograd, m) {
  m.impl("use_isa", TORCH_BOX(&entropykv::use_isa));
  m.impl("isa", TORCH_BOX(&entropykv::isa));
  m.impl("capacity", TORCH_BOX(&entropykv::cold_capacity));
}

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}

// SPDX-License-Identifier: Apache-2.0
// The torch operators of the CPU: checks, and the work cut up for the threads. Only torch's stable
// ABI is used, so one build serves many versions of torch.
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/select.h"
#include "stable_checks.h"

namespace entropykv {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
const T* integers(const Tensor& t, ScalarType type, int64_t dim, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == type && t.dim() == dim && t.is_contiguous(),
                  "entropykv: ", name, " must be contiguous, of ", dim,
                  " dimensions and its integer type");
  return static_cast<const T*>(t.const_data_ptr());
}

Cache cache_of(const Tensor& t, int64_t bits) {
  return Cache{geometry_of(t, bits), static_cast<uint8_t*>(t.mutable_data_ptr())};
}

// A table with a number for each slot of a page, of which `used` may be in use.
Slots slots_of(const Tensor& t, const char* name, const Tensor& cache, int used) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.dim() == 3 &&
                      t.size(0) == cache.size(0) && t.size(1) == cache.size(1) &&
                      t.size(2) >= used && t.stride(2) == 1,
                  "entropykv: ", name, " is float32 [pages, heads, slots] with at least ", used,
                  " slots, those of a page and head side by side");
  return Slots{static_cast<float*>(t.mutable_data_ptr()), t.stride(0), t.stride(1)};
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
            heads_are_apart(*t, c.head_size) && type_of(*t) == type,
        "entropykv: keys and values are [tokens, heads, head size], heads side by side");
  const int64_t* where = integers<int64_t>(slots, ScalarType::Long, 1, "slots");
  const int64_t tokens = slots.numel(), end = cache.size(0) * c.page;
  STD_TORCH_CHECK(key.size(0) >= tokens && value.size(0) >= tokens,
                  "entropykv: more slots than tokens");
  for (int64_t i = 0; i < tokens; ++i)
    STD_TORCH_CHECK(where[i] < end, "entropykv: slot ", where[i], " is outside the cache");
  check_apart({&slots}, cache);
  const auto* k = static_cast<const uint8_t*>(key.const_data_ptr());
  const auto* v = static_cast<const uint8_t*>(value.const_data_ptr());
  const Kernels& run = kernels();
  for_each(c.heads, [&](int64_t head) {
    run.write(c, k, v, type, key.stride(0), value.stride(0), where, tokens, int(head));
  });
}

// -- attention --

// The requests of a call: their rows, pages and tokens.
struct Batch {
  const int32_t *starts, *table, *cold, *hot;
  int64_t width, requests;

  int64_t queries(int64_t request) const { return int64_t{starts[request + 1]} - starts[request]; }
  const int32_t* pages(int64_t request) const { return table + request * width; }
  int64_t pages_in_use(int64_t request, const Cache& c) const {
    return cold[request] + (hot[request] + int64_t{c.page} - 1) / c.page;
  }
};

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

// Blocks of rows by request, head and row; `from`: the first row of each request, or null for 0.
std::vector<Unit> units_of(const Attention& call, const Batch& batch, const int32_t* from) {
  std::vector<Unit> units;
  const Cache& c = call.cache;
  const int block = std::max(1, kMaxRows / call.group);
  for (int64_t r = 0; r < batch.requests; ++r) {
    const int queries = int(batch.queries(r)), start = from ? std::max(from[r], 0) : 0;
    for (int head = 0; head < c.heads; ++head)
      for (int first = start; first < queries; first += block) {
        Unit u{};
        const int n = std::min(block, queries - first), position = batch.hot[r] - queries + first;
        u.work = Work{batch.pages(r), batch.cold[r], batch.starts[r] + first, n, position, head, 0};
        u.rows = n * call.group;
        u.splits = cold_splits(c, batch.cold[r]) + hot_splits(position + n);
        units.push_back(u);
      }
  }
  return units;
}

Attention attention_of(const Tensor& query, const Tensor& cache, int64_t bits, double scale,
                       double softcap) {
  Attention call{};
  call.cache = cache_of(cache, bits);
  const Cache& c = call.cache;
  STD_TORCH_CHECK(query.dim() == 3 && query.size(1) % c.heads == 0 &&
                      query.size(2) == c.head_size && query.stride(2) == 1 &&
                      heads_are_apart(query, c.head_size),
                  "entropykv: queries are [tokens, query heads, head size], heads side by side");
  call.query = static_cast<const uint8_t*>(query.const_data_ptr());
  call.query_type = type_of(query);
  call.query_stride = query.stride(0);
  const int64_t group = query.size(1) / c.heads;
  STD_TORCH_CHECK(group >= 1 && group <= kMaxRows, "entropykv: 1 to ", kMaxRows,
                  " query heads share a KV head, not ", group);
  call.group = int(group);
  call.scale = float(scale);
  call.softcap = float(softcap);
  return call;
}

void check_request(const Batch& batch, int64_t r, const Cache& c, int64_t pages) {
  const int64_t queries = batch.queries(r), cold = batch.cold[r], hot = batch.hot[r];
  STD_TORCH_CHECK(
      queries >= 0 && queries <= hot && cold >= 0 && batch.pages_in_use(r, c) <= batch.width,
      "entropykv: request ", r, " has more tokens than pages, or queries than hot tokens");
  STD_TORCH_CHECK(cold * std::max(c.page, c.cold_tokens) + hot <= kMostTokens,
                  "entropykv: request ", r, " has more than ", kMostTokens, " tokens");
  for (int64_t i = 0; i < batch.pages_in_use(r, c); ++i)
    STD_TORCH_CHECK(batch.pages(r)[i] >= 0 && batch.pages(r)[i] < pages, "entropykv: page ",
                    batch.pages(r)[i], " is outside the cache");
}

Batch batch_of(const Tensor& starts, const Tensor& table, const Tensor& cold, const Tensor& hot,
               int64_t rows, const Cache& c, int64_t pages) {
  Batch batch{};
  batch.starts = integers<int32_t>(starts, ScalarType::Int, 1, "starts");
  batch.table = integers<int32_t>(table, ScalarType::Int, 2, "table");
  batch.cold = integers<int32_t>(cold, ScalarType::Int, 1, "cold");
  batch.hot = integers<int32_t>(hot, ScalarType::Int, 1, "hot");
  batch.width = table.size(1);
  batch.requests = cold.numel();
  STD_TORCH_CHECK(
      starts.numel() == batch.requests + 1 && table.size(0) >= batch.requests &&
          hot.numel() == batch.requests &&
          (batch.requests == 0 || (batch.starts[0] >= 0 && batch.starts[batch.requests] <= rows)),
      "entropykv: starts, table, cold and hot do not fit each other or the queries");
  for (int64_t r = 0; r < batch.requests; ++r) check_request(batch, r, c, pages);
  return batch;
}

const float* sinks_of(const std::optional<Tensor>& sinks, int64_t query_heads) {
  if (!sinks) return nullptr;
  STD_TORCH_CHECK(sinks->scalar_type() == ScalarType::Float && sinks->numel() == query_heads &&
                      sinks->is_contiguous(),
                  "entropykv: sinks are float32, one for each query head");
  return static_cast<const float*>(sinks->const_data_ptr());
}

void attention(const Tensor& query, const Tensor& cache, const Tensor& output, const Tensor& starts,
               const Tensor& table, const Tensor& cold, const Tensor& hot, int64_t bits,
               double scale, double softcap, std::optional<Tensor> sinks) {
  const Attention call = attention_of(query, cache, bits, scale, softcap);
  const int D = call.cache.head_size;
  STD_TORCH_CHECK(
      output.dim() == 3 && output.size(1) == query.size(1) && output.size(2) == D &&
          output.stride(2) == 1 && heads_are_apart(output, D),
      "entropykv: output is [tokens, query heads, head size] as the queries, heads side by side");
  const Batch batch = batch_of(starts, table, cold, hot, std::min(query.size(0), output.size(0)),
                               call.cache, cache.size(0));
  check_apart({&starts, &table, &cold, &hot}, output);
  const Output out{static_cast<uint8_t*>(output.mutable_data_ptr()), type_of(output),
                   output.stride(0), sinks_of(sinks, query.size(1))};
  auto units = units_of(call, batch, nullptr);
  if (worth_splitting(units, D)) return attend_splits(call, units, out);
  for_each(int64_t(units.size()), [&](int64_t i) { attend_unit(call, units[i], out); });
}

// -- observe --

// One head's slots in use of a request's pages.
void clear_slots(const Slots& mass, const Batch& batch, int64_t request, const Cache& c, int head) {
  const int32_t* pages = batch.pages(request);
  const int cold = batch.cold[request];
  for (int64_t i = 0; i < batch.pages_in_use(request, c); ++i)
    std::fill_n(slots_of(mass, pages[i], head), i < cold ? c.cold_tokens : c.page, 0.0f);
}

// Heads side by side, and the requests of a head in order, since they may share pages.
void observe(const Tensor& query, const Tensor& cache, const Tensor& mass, const Tensor& starts,
             const Tensor& table, const Tensor& cold, const Tensor& hot, int64_t bits, double scale,
             double softcap, std::optional<Tensor> sinks, const Tensor& first,
             const Tensor& fresh) {
  const Attention call = attention_of(query, cache, bits, scale, softcap);
  const Cache& c = call.cache;
  const Slots slots = slots_of(mass, "mass", cache, std::max(c.page, c.cold_tokens));
  const Batch batch = batch_of(starts, table, cold, hot, query.size(0), c, cache.size(0));
  const auto* from = integers<int32_t>(first, ScalarType::Int, 1, "first");
  const auto* clear = integers<int32_t>(fresh, ScalarType::Int, 1, "fresh");
  STD_TORCH_CHECK(first.numel() == batch.requests && fresh.numel() == batch.requests,
                  "entropykv: first and fresh have one number for each request");
  check_apart({&starts, &table, &cold, &hot, &first, &fresh}, mass);
  const float* logits = sinks_of(sinks, query.size(1));
  const auto units = units_of(call, batch, from);
  const Kernels& run = kernels();
  for_each(c.heads, [&](int64_t head) {
    for (int64_t r = 0; r < batch.requests; ++r)
      if (clear[r]) clear_slots(slots, batch, r, c, int(head));
    for (const Unit& u : units)
      if (u.work.head == head)
        run.observe(call, u.work, slots, logits ? logits + head * call.group : nullptr,
                    scratch_arena.get(run.scratch_bytes()));
  });
}

// -- collapse and drop --

struct Moves {
  Cache cache;
  const int64_t *src, *dst, *sinks;
  int64_t count;
  int from, into; // pages of a move
  int policy;
  int run;             // tokens that stay or go together
  int from_bits;       // of the pages that are read, 16 for hot ones
  const float* scores; // [moves][heads][tokens], or null: those of the policy
  Slots side;          // numbers that go with the tokens, if there are any

  int page_tokens() const { return from_bits < 16 ? cache.cold_tokens : cache.page; }
  int tokens() const { return from * page_tokens(); }
};

Moves moves_of(const Tensor& cache, const Tensor& src, const Tensor& dst, const Tensor& sinks,
               int64_t from_bits, int64_t bits) {
  Moves m{};
  m.cache = cache_of(cache, bits);
  STD_TORCH_CHECK(from_bits == 16 || from_bits == bits, "entropykv: pages of ", from_bits,
                  " bits cannot become pages of ", bits);
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
  m.run = 1;
  m.from_bits = int(from_bits);
  STD_TORCH_CHECK(src.size(1) <= kMostTokens / std::max(m.cache.page, m.cache.cold_tokens),
                  "entropykv: a move has more than ", kMostTokens, " tokens");
  check_apart({&src, &dst, &sinks}, cache);
  for (const Tensor* t : {&src, &dst})
    for (int64_t i = 0; i < t->numel(); ++i) {
      const int64_t page = static_cast<const int64_t*>(t->const_data_ptr())[i];
      STD_TORCH_CHECK(page >= 0 && page < cache.size(0), "entropykv: page ", page,
                      " is outside the cache");
    }
  return m;
}

void score_by(Moves& m, const std::string& policy, const std::optional<Tensor>& scores) {
  if (!scores) {
    m.policy = policy_of(policy);
    return;
  }
  STD_TORCH_CHECK(scores->scalar_type() == ScalarType::Float && scores->dim() == 3 &&
                      scores->is_contiguous() && scores->size(0) == m.count &&
                      scores->size(1) == m.cache.heads && scores->size(2) == m.tokens(),
                  "entropykv: scores are float32 [moves, heads, tokens of src], contiguous");
  m.scores = static_cast<const float*>(scores->const_data_ptr());
}

void carry(Moves& m, const std::optional<Tensor>& side, const Tensor& cache,
           std::initializer_list<const Tensor*> integers) {
  if (!side) return;
  m.side = slots_of(*side, "side", cache, std::max(m.page_tokens(), m.cache.cold_tokens));
  check_apart(integers, *side);
}

// Keys, values, scores and side numbers, and the survivors' keys, values and codes, of one head of
// one move.
struct Tokens {
  std::vector<float> keys, values, scores, numbers, kept_keys, kept_values;
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
  void score(const Moves& m, int64_t move, int head) {
    scores.resize(m.tokens());
    if (m.scores) {
      std::copy_n(m.scores + (move * m.cache.heads + head) * m.tokens(), m.tokens(),
                  scores.begin());
      return;
    }
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
  void move_numbers(const Moves& m, int64_t move, int head, const std::vector<int>& best) {
    if (!m.side.data) return;
    const int from = m.page_tokens(), into = m.cache.cold_tokens;
    numbers.resize(m.tokens());
    for (int i = 0; i < m.from; ++i)
      std::copy_n(slots_of(m.side, m.src[move * m.from + i], head), from,
                  numbers.begin() + i * from);
    for (int i = 0; i < m.into; ++i) {
      float* to = slots_of(m.side, m.dst[move * m.into + i], head);
      for (int t = 0; t < into; ++t) to[t] = numbers[best[i * into + t]];
    }
  }
};
thread_local Tokens tokens_of_thread;

std::vector<int> choose(const Moves& m, int64_t move, const std::vector<float>& scores) {
  const int tokens = int(scores.size()), keep = m.into * m.cache.cold_tokens;
  const int protect = int(std::clamp<int64_t>(m.sinks[move], 0, keep));
  return best_runs(scores.data(), tokens, keep, protect, m.run);
}

// Each head by itself. Moves go in order, so that a page freed by one may be filled by a later one.
void collapse_heads(const Moves& m) {
  for_each(m.cache.heads, [&](int64_t head) {
    Tokens& t = tokens_of_thread;
    for (int64_t move = 0; move < m.count; ++move) {
      t.read(m, move, int(head));
      t.score(m, move, int(head));
      const std::vector<int> best = choose(m, move, t.scores);
      t.take(best, m.cache.head_size);
      t.write(m, move, int(head));
      t.move_numbers(m, move, int(head), best);
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
      if (!m.scores) t.read(m, move, int(head));
      t.score(m, move, int(head));
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
      t.move_numbers(m, move, int(head), best);
    });
  }
}

void collapse(const Tensor& cache, const Tensor& src, const Tensor& dst, const Tensor& sinks,
              Word policy, Word granularity, Word scope, int64_t from_bits, int64_t bits,
              std::optional<Tensor> scores, std::optional<Tensor> side) {
  Moves m = moves_of(cache, src, dst, sinks, from_bits, bits);
  score_by(m, policy, scores);
  carry(m, side, cache, {&src, &dst, &sinks});
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
          Word policy, int64_t bits, std::optional<Tensor> scores, std::optional<Tensor> side) {
  Moves m = moves_of(cache, src, dst, sinks, bits, bits);
  score_by(m, policy, scores);
  carry(m, side, cache, {&src, &dst, &sinks});
  const Cache& c = m.cache;
  m.run = c.cold_tokens;
  for_each(c.heads, [&](int64_t head) {
    Tokens& t = tokens_of_thread;
    std::vector<uint8_t> kept(size_t(m.into) * c.head_bytes);
    const auto at = [&](int64_t page) { return head_of(c, page, int(head)); };
    for (int64_t move = 0; move < m.count; ++move) {
      if (!m.scores) t.read(m, move, int(head));
      t.score(m, move, int(head));
      const std::vector<int> best = choose(m, move, t.scores);
      for (int i = 0; i < m.into; ++i)
        std::copy_n(at(m.src[move * m.from + best[size_t(i) * m.run] / m.run]), c.head_bytes,
                    kept.data() + i * c.head_bytes);
      for (int i = 0; i < m.into; ++i)
        std::copy_n(kept.data() + i * c.head_bytes, c.head_bytes, at(m.dst[move * m.into + i]));
      t.move_numbers(m, move, int(head), best);
    }
  });
}

// -- about --

bool use_isa(Word name) {
  return set_isa(name.c_str());
}
std::string isa() {
  return kernels().name;
}
int64_t cold_capacity(int64_t head_size, int64_t page, int64_t item, int64_t bits) {
  check_sizes(head_size, page, bits);
  STD_TORCH_CHECK(item == 2 || item == 4, "entropykv: numbers have 2 or 4 bytes, not ", item);
  return capacity(int(head_size), int(page), int(item), int(bits));
}

} // namespace
} // namespace entropykv

STABLE_TORCH_LIBRARY(entropykv, m) {
  m.def("write(Tensor key, Tensor value, Tensor(a!) cache, Tensor slots) -> ()");
  m.def("attention(Tensor query, Tensor cache, Tensor(a!) output, Tensor starts, Tensor table, "
        "Tensor cold, "
        "Tensor hot, int bits, float scale, float softcap, Tensor? sinks) -> ()");
  m.def("observe(Tensor query, Tensor cache, Tensor(a!) mass, Tensor starts, Tensor table, Tensor "
        "cold, Tensor hot, int bits, float scale, float softcap, Tensor? sinks, Tensor first, "
        "Tensor fresh) -> ()");
  m.def("collapse(Tensor(a!) cache, Tensor src, Tensor dst, Tensor sinks, str policy, str "
        "granularity, str scope, int from_bits, int bits, Tensor? scores=None, Tensor(b!)? "
        "side=None) -> ()");
  m.def("drop(Tensor(a!) cache, Tensor src, Tensor dst, Tensor sinks, str policy, int bits, "
        "Tensor? scores=None, Tensor(b!)? side=None) -> ()");
  m.def("use_isa(str name) -> bool");
  m.def("isa() -> str");
  m.def("capacity(int head_size, int page, int item_bytes, int bits) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(entropykv, CPU, m) {
  m.impl("write", TORCH_BOX(&entropykv::write));
  m.impl("attention", TORCH_BOX(&entropykv::attention));
  m.impl("observe", TORCH_BOX(&entropykv::observe));
  m.impl("collapse", TORCH_BOX(&entropykv::collapse));
  m.impl("drop", TORCH_BOX(&entropykv::drop));
}

STABLE_TORCH_LIBRARY_IMPL(entropykv, CompositeExplicitAutograd, m) {
  m.impl("use_isa", TORCH_BOX(&entropykv::use_isa));
  m.impl("isa", TORCH_BOX(&entropykv::isa));
  m.impl("capacity", TORCH_BOX(&entropykv::cold_capacity));
}

namespace {

// Not taken for "the best there is": whoever misspells a name would compare a thing with itself.
bool isa_is_known() {
  const char* wanted = getenv("ENTROPYKV_ISA");
  if (!wanted || !*wanted) return true;
  std::string names;
  for (int i = 0; const char* name = entropykv::isa_name(i); ++i) {
    if (strcmp(name, wanted) == 0) return true;
    names += i ? std::string(", ") + name : name;
  }
  PyErr_Format(PyExc_ValueError, "ENTROPYKV_ISA is '%s', not one of %s", wanted, names.c_str());
  return false;
}

} // namespace

PyMODINIT_FUNC PyInit__C(void) {
  if (!isa_is_known()) return nullptr;
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}

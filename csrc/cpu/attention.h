// SPDX-License-Identifier: Apache-2.0
// Attention of a block of query rows over a range of a request's tokens, one softmax step a piece.
// Rows are (query token, query head of the group), and each row's arithmetic depends on its own
// tokens only: not on the other rows, nor on how many there are.
#pragma once

#include "kernels.h"
#include "product.h"
#ifdef EKV_TILES
#include "tiles.h"
#endif

namespace {

using entropykv::Attention;
using entropykv::Cache;
using entropykv::head_of;
using entropykv::kMaxHead;
using entropykv::kMaxRows;
using entropykv::kMaxTokens;
using entropykv::Partial;
using entropykv::Slots;
using entropykv::Work;

constexpr int kMaxTiles = kMaxTokens / 16;
constexpr float kInfinity = __builtin_inff();

#if EKV_PAIRS
template <int format> struct ProductOf {
#ifdef EKV_TILES
  typedef TileProduct type;
#else
  typedef PairProduct type;
#endif
};
template <> struct ProductOf<kF32> {
  typedef FloatProduct type;
};
template <> struct ProductOf<kF16> {
  typedef FloatProduct type;
};
#else
template <int format> struct ProductOf {
  typedef FloatProduct type;
};
#endif

// Up to kMaxTokens tokens: a tile pointer for each 16 keys, and runs of values within a page.
struct Run {
  const uint8_t* values; // channel block 0
  int64_t stride;        // bytes from channel block to channel block
  int first, tokens;     // in the piece
  int32_t page, place;   // where its first token lies
};
struct Piece {
  int tokens;
  const uint8_t* keys[kMaxTiles];
  Run runs[kMaxTiles];
  int run_count;
  int first; // index of the first token among the hot tokens; only for hot pieces
  const uint8_t *key_scale, *key_zero, *value_scale, *value_zero; // quantized pieces
};

struct Scratch {
  alignas(64) float query[kMaxRows * kMaxHead];
  alignas(64) uint8_t factor[kMaxRows * kMaxHead * 4]; // left side of a product: float or bf16
  alignas(64) float logits[kMaxRows * kMaxTokens];
  alignas(64) uint8_t weights[kMaxRows * kMaxTokens * 4];
  alignas(64) float offset[kMaxRows][kMaxTokens / entropykv::kGroup];
  alignas(64) float zero_sum[kMaxRows];
  alignas(64) uint8_t keys[kMaxTokens * kMaxHead * 4];
  alignas(64) uint8_t values[kMaxTokens * kMaxHead * 4];
  alignas(64) uint8_t tail[4 * kMaxHead / 16 * 512];
  alignas(64) float columns[kMaxTokens];
};

struct Rows {
  int count, group, head_size;
  const Attention& call;
  Work work;
  Partial state;
  Scratch& s;
  const Slots* mass; // only of `observe`
};

EKV_INLINE void put(float* to, vf x) {
  store(to, x);
}
EKV_INLINE void put(uint16_t* to, vf x) {
#if EKV_PAIRS
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x.p[0]));
#else
  store_u16(to, to_bf16(x));
#endif
}

static void read_queries(Rows& rows) {
  const Attention& call = rows.call;
  const int D = rows.head_size, item = entropykv::item_bytes(call.query_type);
  for (int r = 0; r < rows.count; ++r) {
    const int64_t token = rows.work.first_row + r / rows.group;
    const int64_t head = int64_t{rows.work.head} * rows.group + r % rows.group;
    const uint8_t* from = call.query + (token * call.query_stride + head * D) * item;
    for (int d = 0; d < D; d += 16)
      store(rows.s.query + r * D + d, load_type(from + d * item, call.query_type));
  }
}

// Tokens of the piece that a row sees.
EKV_INLINE int visible(const Rows& rows, const Piece& piece, bool hot, int row) {
  if (!hot) return piece.tokens;
  const int limit = rows.work.position + row / rows.group + 1 - piece.first;
  return limit < 0 ? 0 : limit < piece.tokens ? limit : piece.tokens;
}

// The left side of the logits' product, scaled per channel for a group of quantized keys; and what
// the keys' zeros add to the group's logits.
template <class Element>
static void scale_queries(Rows& rows, const Piece& piece, int group, float centre) {
  const int D = rows.head_size;
  const uint8_t* scales = piece.key_scale + int64_t{2} * group * D;
  const uint8_t* zeros = piece.key_zero + int64_t{2} * group * D;
  Element* factor = reinterpret_cast<Element*>(rows.s.factor);
  for (int r = 0; r < rows.count; ++r) {
    vf total = set1(0);
    for (int d = 0; d < D; d += 16) {
      const vf scale = from_half(load_u16(scales + 2 * d));
      const vf zero = fma(scale, set1(centre), from_half(load_u16(zeros + 2 * d)));
      const vf q = load(rows.s.query + r * D + d) * set1(rows.call.scale);
      put(factor + r * D + d, q * scale);
      total = fma(q, zero, total);
    }
    rows.s.offset[r][group] = sum(total);
  }
}

template <class Element> static void plain_queries(Rows& rows) {
  Element* factor = reinterpret_cast<Element*>(rows.s.factor);
  const int n = rows.count * rows.head_size;
  for (int i = 0; i < n; i += 16) put(factor + i, load(rows.s.query + i));
}

// Blocks with their codes turned into the elements of the product, once for many rows.
template <int format>
static void expand(const uint8_t* from, const uint8_t* ahead, int blocks, uint8_t* to) {
  for (int i = 0; i < blocks; ++i, from += block_bytes(format)) {
    if (ahead) fetch<format>(ahead + int64_t{i} * block_bytes(format));
#if EKV_PAIRS
    __m512i block[4];
    PairBlock<format>::load(from, block);
    for (int k = 0; k < 4; ++k, to += 64) _mm512_storeu_si512(to, block[k]);
#else
    vf block[8];
    Block<format>::load(from, block);
    for (int k = 0; k < 8; ++k, to += 64) store(reinterpret_cast<float*>(to), block[k]);
#endif
  }
}

constexpr int kExpanded = EKV_PAIRS ? kBf16 : kF32;
#ifdef EKV_TILES
constexpr int kExpandRows = 1; // from how many rows on: tiles take no codes
#else
constexpr int kExpandRows = 2 * kRows + 1;
#endif
constexpr int kAheadRows = 2 * kRows; // up to how many rows memory is waited for

template <int format> static void logits_of(Rows& rows, const Piece& piece, const Piece* next) {
  typedef typename ProductOf<format>::type P;
  typedef typename P::Element Element;
  const int D = rows.head_size, tiles = (piece.tokens + 15) / 16;
  const Element* factor = reinterpret_cast<const Element*>(rows.s.factor);
  if constexpr (!quantized(format)) {
    const Columns keys{piece.keys, next ? next->keys : nullptr, tiles, D / 8};
    product<P, format>(factor, D, rows.count, keys, rows.s.logits, kMaxTokens, false);
  } else {
    const bool many = rows.count >= kExpandRows;
    const uint8_t* keys[kMaxTiles];
    for (int i = 0; i < tiles; ++i) {
      keys[i] = piece.keys[i];
      if (!many) continue;
      uint8_t* to = rows.s.keys + i * (D / 8) * block_bytes(kExpanded);
      expand<format>(piece.keys[i], next ? next->keys[i] : nullptr, D / 8, to);
      keys[i] = to;
    }
    constexpr int per_group = entropykv::kGroup / 16;
    for (int i = 0; i < tiles; i += per_group) {
      const int n = tiles - i < per_group ? tiles - i : per_group;
      scale_queries<Element>(rows, piece, i / per_group, centre(format));
      float* out = rows.s.logits + 16 * i;
      if (many)
        product<P, kExpanded>(factor, D, rows.count, {keys + i, nullptr, n, D / 8}, out, kMaxTokens,
                              false);
      else
        product<P, format>(factor, D, rows.count,
                           {keys + i, next ? next->keys + i : nullptr, n, D / 8}, out, kMaxTokens,
                           false);
    }
  }
}

EKV_INLINE vf soft_capped(vf x, float cap) {
  const vf t = exp_negative(abs(x) * set1(-2.0f / cap));
  const vf size = set1(cap) * ((set1(1) - t) / (set1(1) + t));
  return as_float((as_bits(size) & set1u(0x7fffffff)) | (as_bits(x) & set1u(0x80000000)));
}

static const float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// A row's logits from token `t` on, as exp takes them.
template <int format> EKV_INLINE vf finished(const Rows& rows, int row, int t, int limit) {
  vf x = load(rows.s.logits + row * kMaxTokens + t);
  if constexpr (quantized(format))
    x = x + set1(rows.s.offset[row][t / entropykv::kGroup]);
  else
    x = x * set1(rows.call.scale);
  if (rows.call.softcap > 0) x = soft_capped(x, rows.call.softcap);
  if (t + 16 > limit) x = where_less(load(kLanes), set1(float(limit - t)), x, set1(-kInfinity));
  return x;
}

// A row's logits become what exp takes; their maximum.
template <int format> EKV_INLINE float finish_logits(Rows& rows, int row, int limit) {
  vf most = set1(-kInfinity);
  for (int t = 0; t < limit; t += 16) {
    const vf x = finished<format>(rows, row, t, limit);
    store(rows.s.logits + row * kMaxTokens + t, x);
    most = max(most, x);
  }
  return largest(most);
}

// One step of the online softmax: logits to weights, in the elements of the next product.
template <int format> static void weights_of(Rows& rows, const Piece& piece, bool causal) {
  typedef typename ProductOf<format>::type::Element Element;
  Element* weights = reinterpret_cast<Element*>(rows.s.weights);
  const int D = rows.head_size, padded = (piece.tokens + 15) / 16 * 16;
  for (int r = 0; r < rows.count; ++r) {
    Element* out = weights + r * kMaxTokens;
    const int limit = visible(rows, piece, causal, r);
    const float most = limit ? finish_logits<format>(rows, r, limit) : -kInfinity;
    const float before = rows.state.max[r], now = most > before ? most : before;
    const int end = now == -kInfinity ? 0 : (limit + 15) / 16 * 16;
    for (int t = end; t < padded; t += 16) put(out + t, set1(0));
    if (end == 0) continue;
    const float* logits = rows.s.logits + r * kMaxTokens;
    vf total = set1(0), zeros = set1(0);
    for (int t = 0; t < end; t += 16) {
      vf p = exp_negative(load(logits + t) - set1(now));
      total = total + p;
      if constexpr (quantized(format)) {
        const vf scale = from_half(load_u16(piece.value_scale + 2 * t));
        zeros =
            fma(p, fma(scale, set1(centre(format)), from_half(load_u16(piece.value_zero + 2 * t))),
                zeros);
        p = p * scale;
      }
      put(out + t, p);
    }
    if (before != now) {
      const float shrink = exp_negative(before - now);
      rows.state.max[r] = now;
      rows.state.sum[r] *= shrink;
      rows.s.zero_sum[r] *= shrink;
      float* acc = rows.state.acc + int64_t{r} * D;
      for (int d = 0; d < D; d += 16) store(acc + d, load(acc + d) * set1(shrink));
    }
    rows.state.sum[r] += sum(total);
    if constexpr (quantized(format)) rows.s.zero_sum[r] += sum(zeros);
  }
}

template <int format> static void add_run(Rows& rows, const Run& run, const Run* next) {
  typedef typename ProductOf<format>::type P;
  const typename P::Element* weights =
      reinterpret_cast<const typename P::Element*>(rows.s.weights) + run.first;
  const uint8_t *columns[kMaxHead / 16], *ahead[kMaxHead / 16];
  const int D = rows.head_size;
  for (int c = 0; c < D / 16; ++c) {
    columns[c] = run.values + c * run.stride;
    if (next) ahead[c] = next->values + c * next->stride;
  }
  product<P, format>(weights, kMaxTokens, rows.count,
                     {columns, next ? ahead : nullptr, D / 16, run.tokens / 8}, rows.state.acc, D,
                     true);
}

// Blocks of values that one instruction adds up: a token's place among them must not depend on how
// many tokens there are yet.
#ifdef EKV_TILES
constexpr int kTogether = 4;
#else
constexpr int kTogether = 1;
#endif

// A run from block `first` on, of which the last is only partly filled: what lies behind may be
// anything, NaN too.
template <int format> static void add_tail(Rows& rows, const Run& run, int first) {
  constexpr int item = format == kF32 ? 4 : 2, pair = 4 / item;
  const int left = run.tokens - 8 * first, blocks = (left + 7) / 8;
  const int whole = left / pair * 64; // bytes of the pair-rows that are filled
  const int64_t stride = int64_t{blocks} * block_bytes(format);
  for (int c = 0; c < rows.head_size / 16; ++c) {
    const uint8_t* from = run.values + c * run.stride + int64_t{first} * block_bytes(format);
    uint8_t* to = rows.s.tail + c * stride;
    memset(to, 0, stride);
    memcpy(to, from, whole);
    if (left % pair)
      for (int column = whole; column < whole + 64; column += 4)
        memcpy(to + column, from + column, item);
  }
  add_run<format>(rows, Run{rows.s.tail, stride, run.first + 8 * first, 8 * blocks}, nullptr);
}

template <int format> static void add_codes(Rows& rows, const Run& run, const Run* after) {
  if (rows.count < kExpandRows) return add_run<format>(rows, run, after);
  const int blocks = run.tokens / 8;
  const int64_t stride = int64_t{blocks} * block_bytes(kExpanded);
  for (int c = 0; c < rows.head_size / 16; ++c)
    expand<format>(run.values + c * run.stride, after ? after->values + c * after->stride : nullptr,
                   blocks, rows.s.values + c * stride);
  add_run<kExpanded>(rows, Run{rows.s.values, stride, run.first, run.tokens}, nullptr);
}

template <int format> static void add_values(Rows& rows, const Piece& piece, const Piece* next) {
  for (int i = 0; i < piece.run_count; ++i) {
    const Run& run = piece.runs[i];
    const Run* after = next && i < next->run_count ? &next->runs[i] : nullptr;
    if constexpr (quantized(format)) {
      add_codes<format>(rows, run, after);
    } else {
      const bool partly = run.tokens % 8;
      const int blocks = partly ? run.tokens / 8 / kTogether * kTogether : run.tokens / 8;
      if (blocks) add_run<format>(rows, Run{run.values, run.stride, run.first, 8 * blocks}, after);
      if (partly) add_tail<format>(rows, run, blocks);
    }
  }
}

// What is done with a piece whose logits are there.
struct Attend {
  template <int format>
  static void step(Rows& rows, const Piece& piece, const Piece* next, bool causal) {
    weights_of<format>(rows, piece, causal);
    add_values<format>(rows, piece, next);
  }
};

// Tokens `first` to `first + tokens` of some pages in the hot format.
template <int format>
static Piece paged_piece(const Rows& rows, const int32_t* pages, int first, int tokens) {
  const Cache& cache = rows.call.cache;
  const int D = rows.head_size, B = cache.page;
  const int64_t tile = int64_t{D / 8} * block_bytes(format),
                column = int64_t{B / 8} * block_bytes(format);
  Piece piece{};
  piece.tokens = tokens;
  piece.first = first;
  for (int t = 0; t < tokens; t += 16) {
    const int at = first + t, offset = at % B;
    const uint8_t* head = head_of(cache, pages[at / B], rows.work.head);
    piece.keys[t / 16] = head + offset / 16 * tile;
    const int n = tokens - t < 16 ? tokens - t : 16;
    if (offset && piece.run_count) {
      piece.runs[piece.run_count - 1].tokens += n;
      continue;
    }
    const uint8_t* values = head + B / 16 * tile + int64_t{offset / 8} * block_bytes(format);
    piece.runs[piece.run_count++] = Run{values, column, t, n, pages[at / B], offset};
  }
  return piece;
}

// Step by step over pieces `at(0)` to `at(count - 1)`, each while the next one is fetched.
template <class Step, int format, class At>
static void walk(Rows& rows, int count, bool causal, const At& at) {
  if (count <= 0) return;
  Piece piece = at(0);
  for (int i = 0; i < count; ++i) {
    const bool more = i + 1 < count;
    const Piece following = more ? at(i + 1) : Piece{};
    // With many rows there is enough to do while memory answers.
    const Piece* next = more && rows.count <= kAheadRows ? &following : nullptr;
    logits_of<format>(rows, piece, next);
    Step::template step<format>(rows, piece, next, causal);
    piece = following;
  }
}

template <class Step, int format>
static void walk_paged(Rows& rows, const int32_t* pages, int begin, int end, bool causal) {
  plain_queries<typename ProductOf<format>::type::Element>(rows);
  walk<Step, format>(rows, (end - begin + kMaxTokens - 1) / kMaxTokens, causal, [&](int i) {
    const int first = begin + i * kMaxTokens, left = end - first;
    return paged_piece<format>(rows, pages, first, left < kMaxTokens ? left : kMaxTokens);
  });
}

template <class Step>
static void walk_hot(Rows& rows, const int32_t* pages, int begin, int end, bool causal) {
  switch (rows.call.cache.type) {
  case entropykv::kFloat32: return walk_paged<Step, kF32>(rows, pages, begin, end, causal);
  case entropykv::kBFloat16: return walk_paged<Step, kBf16>(rows, pages, begin, end, causal);
  default: return walk_paged<Step, kF16>(rows, pages, begin, end, causal);
  }
}

template <int format> static Piece cold_piece(const Rows& rows, int32_t page, int first) {
  const uint8_t* head = head_of(rows.call.cache, page, rows.work.head);
  const int D = rows.head_size, T = rows.call.cache.cold_tokens;
  const entropykv::ColdLayout layout{D, T, rows.call.cache.bits};
  const int n = T - first < kMaxTokens ? T - first : kMaxTokens, group = first / entropykv::kGroup;
  Piece piece{};
  piece.tokens = n;
  for (int t = 0; t < n; t += 16)
    piece.keys[t / 16] = head + int64_t{(first + t) / 16} * (D / 8) * block_bytes(format);
  piece.runs[0] = Run{head + layout.value_codes() + int64_t{first / 8} * block_bytes(format),
                      int64_t{T / 8} * block_bytes(format),
                      0,
                      n,
                      page,
                      first};
  piece.run_count = 1;
  piece.key_scale = head + layout.key_scale() + int64_t{2} * group * D;
  piece.key_zero = head + layout.key_zero() + int64_t{2} * group * D;
  piece.value_scale = head + layout.value_scale() + 2 * first;
  piece.value_zero = head + layout.value_zero() + 2 * first;
  return piece;
}

template <class Step, int format> static void walk_cold(Rows& rows, int begin, int end) {
  const int T = rows.call.cache.cold_tokens, per_page = (T + kMaxTokens - 1) / kMaxTokens;
  walk<Step, format>(rows, (end - begin) * per_page, false, [&](int i) {
    return cold_piece<format>(rows, rows.work.pages[begin + i / per_page],
                              i % per_page * kMaxTokens);
  });
}

template <class Step> static void walk_split(Rows& rows) {
  const Cache& cache = rows.call.cache;
  const Work& work = rows.work;
  const int per = entropykv::cold_pages_per_split(cache),
            cold = entropykv::cold_splits(cache, work.cold_pages);
  if (work.split >= cold) {
    const int begin = (work.split - cold) * entropykv::kSplit;
    const int seen = work.position + work.queries;
    const int end = seen < begin + entropykv::kSplit ? seen : begin + entropykv::kSplit;
    return walk_hot<Step>(rows, work.pages + work.cold_pages, begin, end, true);
  }
  const int begin = work.split * per, left = work.cold_pages - begin,
            end = begin + (left < per ? left : per);
  if (cache.bits == 8) return walk_cold<Step, kQ8>(rows, begin, end);
  if (cache.bits == 4) return walk_cold<Step, kQ4>(rows, begin, end);
  walk_hot<Step>(rows, work.pages, begin * cache.page, end * cache.page, false);
}

static void attend(const Attention& call, const Work& work, Partial state, void* scratch) {
  Scratch& s = *static_cast<Scratch*>(scratch);
  const int D = call.cache.head_size;
  Rows rows{work.queries * call.group, call.group, D, call, work, state, s, nullptr};
  for (int r = 0; r < rows.count; ++r) {
    state.max[r] = -kInfinity;
    state.sum[r] = s.zero_sum[r] = 0;
  }
  memset(state.acc, 0, sizeof(float) * rows.count * D);
  read_queries(rows);
  walk_split<Attend>(rows);
  for (int r = 0; r < rows.count; ++r)
    if (s.zero_sum[r] != 0)
      for (int d = 0; d < D; d += 16) {
        float* acc = state.acc + int64_t{r} * D + d;
        store(acc, load(acc) + set1(s.zero_sum[r]));
      }
}

static void merge(Partial into, Partial part, int rows, int D) {
  for (int r = 0; r < rows; ++r) {
    const float a = into.max[r], b = part.max[r], most = a > b ? a : b;
    if (b == -kInfinity) continue;
    const float old = exp_negative(a - most), added = exp_negative(b - most);
    into.max[r] = most;
    into.sum[r] = into.sum[r] * old + part.sum[r] * added;
    for (int64_t d = int64_t{r} * D; d < int64_t{r + 1} * D; d += 16)
      store(into.acc + d, fma(load(into.acc + d), set1(old), load(part.acc + d) * set1(added)));
  }
}

// What makes a row's weights and that of its sink add up to 1.
static float normalizer(float most, float total, const float* sink) {
  float factor = 1;
  if (sink && *sink > most) {
    factor = exp_negative(most - *sink);
    most = *sink;
  }
  total = total * factor + (sink ? exp_negative(*sink - most) : 0);
  return total > 0 ? factor / total : total;
}

static void finish(Partial state, int rows, int D, int group, const float* sinks, uint8_t* out,
                   int type, int64_t stride) {
  const int item = entropykv::item_bytes(type);
  for (int r = 0; r < rows; ++r) {
    const float* sink = sinks ? sinks + r % group : nullptr;
    const vf scale = set1(normalizer(state.max[r], state.sum[r], sink));
    uint8_t* to = out + (int64_t{r / group} * stride + int64_t{r % group} * D) * item;
    for (int d = 0; d < D; d += 16)
      store_type(to + d * item, load(state.acc + int64_t{r} * D + d) * scale, type);
  }
}

static int64_t scratch_bytes() {
  return sizeof(Scratch);
}

} // namespace

// SPDX-License-Identifier: Apache-2.0
// What each instruction set implements: plain functions over raw pointers, on one thread.
#pragma once

#include <stdint.h>

#include "../page_format.h"
#include "../policies.h"

namespace entropykv {

constexpr int kMaxRows = 64; // query rows (tokens x heads of a group) that are worked on together
constexpr int kMaxTokens = 128; // tokens of a piece: what one softmax step takes in
constexpr int kSplit = 1024;    // tokens of a split, the unit of parallel work and of merging

struct Cache : Geometry {
  uint8_t* data;
};

static inline uint8_t* head_of(const Cache& cache, int64_t page, int head) {
  return cache.data + page * cache.page_bytes + head * cache.head_bytes;
}

// A number for each slot of a page, [pages][heads][slots]; the strides in numbers.
struct Slots {
  float* data; // null: there is no such table
  int64_t page_stride, head_stride;
};

static inline float* slots_of(const Slots& slots, int64_t page, int head) {
  return slots.data + page * slots.page_stride + head * slots.head_stride;
}

struct Attention {
  Cache cache;
  const uint8_t* query;  // [tokens][heads][head_size]
  int query_type, group; // group: query heads of a KV head
  int64_t query_stride;  // elements from token to token
  float scale, softcap;
};

// Query tokens of one request and KV head, against a range of its tokens.
struct Work {
  const int32_t* pages; // cold ones first
  int cold_pages;
  int64_t first_row; // of the query tensor: the block's first token
  int queries;       // tokens of the block
  int position;      // index among the hot tokens of the block's first token
  int head;          // KV head
  int split;
};

// Softmax state of up to kMaxRows rows: maxima, sums, and weighted sums [rows][head_size].
struct Partial {
  float *max, *sum, *acc;
};

struct Kernels {
  const char* name;
  int64_t (*scratch_bytes)();
  void (*attend)(const Attention&, const Work&, Partial, void* scratch);
  void (*merge)(Partial into, Partial part, int rows, int head_size);
  // Rows of the result, in the query's type; `sinks` (one logit per query head of the group) or
  // null.
  void (*finish)(Partial, int rows, int head_size, int group, const float* sinks, uint8_t* out,
                 int type, int64_t stride);
  // Add what all rows of a block give to each token; `split` is not read, `sinks` as in `finish`.
  void (*observe)(const Attention&, const Work&, const Slots& mass, const float* sinks,
                  void* scratch);
  void (*write)(const Cache&, const uint8_t* key, const uint8_t* value, int type,
                int64_t key_stride, int64_t value_stride, const int64_t* slots, int64_t tokens,
                int head);
  // Keys and values of pages as float32 [tokens][head_size].
  void (*read_hot)(const Cache&, const int64_t* pages, int count, int head, float* keys,
                   float* values);
  void (*read_cold)(const Cache&, int64_t page, int head, float* keys, float* values);
  void (*score)(int policy, const float* keys, const float* values, int tokens, int head_size,
                float* out);
  // Fill a cold page with tokens [cold_tokens][head_size]; `codes` has room for as many bytes.
  void (*write_page)(const Cache&, int64_t page, int head, const float* keys, const float* values,
                     uint8_t* codes);
};

// The best that this machine has and ENTROPYKV_ISA allows.
const Kernels& kernels();
// Choose by name, "" for the best; false if this machine cannot run it.
bool set_isa(const char* name);
// Names that ENTROPYKV_ISA may have, null behind the last.
const char* isa_name(int i);

// How a row's tokens are cut into splits: a function of its lengths alone, so results do not depend
// on who else is in the batch.
static inline int cold_pages_per_split(const Cache& c) {
  return c.cold_tokens >= kSplit ? 1 : kSplit / c.cold_tokens;
}
static inline int cold_splits(const Cache& c, int pages) {
  const int per = cold_pages_per_split(c);
  return (pages + per - 1) / per;
}
static inline int hot_splits(int tokens) {
  return (tokens + kSplit - 1) / kSplit;
}

} // namespace entropykv

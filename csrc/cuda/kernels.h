// SPDX-License-Identifier: Apache-2.0
// What the CUDA kernels take and what launches them: plain structs over raw pointers, no torch.
// Pages are in the order of rows, see entropykv_vllm/kernels/layout.py.
#pragma once

#include "../page_format.h"
#include "../policies.h"

namespace entropykv::cuda {

#ifndef EKV_MAX_LAYERS
#define EKV_MAX_LAYERS 128
#endif

constexpr int kMaxLayers = EKV_MAX_LAYERS; // of a launch: their addresses are kernel parameters
constexpr int kThreads = 256;              // of every block

// How a page stores its numbers; the first three as `Type`.
enum Format { kHot32 = kFloat32, kHotB16 = kBFloat16, kHot16 = kFloat16, kCold8, kCold4 };

// The caches of some layers of one shape.
struct Pages : Geometry {
  uint8_t* cache[kMaxLayers];
  int layers;
};

// Moves of one shape on all of the layers. Rows are all (layer, move, head), in this order.
struct Moves {
  Pages pages;
  const int64_t *src, *dst, *sinks; // [moves][from], [moves][into], [moves]
  int moves, from, into;            // from, into: pages of a move
  int format, page_tokens;          // of the pages that are read
  int run;                          // tokens that stay or go together
  int64_t used;                     // bytes of a head that are written to each page of dst
  bool apart;                       // no page of dst is one of src: written to at once

  const float* scores;  // [layers][moves][heads][tokens], layers this far apart
  int64_t score_stride; // in numbers
  const int* best;      // [rows][keep / run], or null: the first ones stay
  bool by_layer;        // one choice for all heads, best is [layers * moves][keep / run]

  uint8_t* packed; // [rows][into][used], what goes to the pages of dst
  float* numbers;  // [rows][keep], what goes to their slots of side

  float* side[kMaxLayers];      // [pages][heads][slots], null: there is no such table
  int64_t side_page, side_head; // its strides, in numbers

  EKV_HD int tokens() const { return from * page_tokens; }
  EKV_HD int keep() const { return into * pages.cold_tokens; }
  EKV_HD int units() const { return tokens() / run; }
  EKV_HD int64_t groups() const { return int64_t{pages.layers} * moves; } // (layer, move)
  EKV_HD int64_t rows() const { return groups() * pages.heads; }
};

struct Write {
  const uint8_t *key, *value; // [tokens][heads][head_size]
  const int64_t* slots;       // [tokens]
  uint8_t* cache;
  int64_t key_stride, value_stride; // bytes from token to token
  int64_t page_bytes, head_bytes, tokens;
  int type, cache_type, heads, head_size, page;
};

// All of them only start work on the stream, and return what CUDA says against it, or null.
using Stream = void*;

// New tokens to their slots; negative slots are skipped.
const char* write_tokens(const Write& write, Stream stream);

// Scores of all tokens of src: `scores` and `raw` have [rows][tokens] numbers, raw for in between.
const char* score(const Moves& moves, int policy, float* scores, float* raw, Stream stream);

// The units that stay, in ascending order, by m.scores. `total` has [layers * moves][tokens]
// numbers, `means` [rows][units].
const char* select(const Moves& moves, int* best, float* total, float* means, Stream stream);

// The tokens that stay, quantized or as they are: to `packed`, or where dst is apart to its pages.
const char* gather(const Moves& moves, Stream stream);

// The same for pages that stay whole: units are pages.
const char* gather_pages(const Moves& moves, Stream stream);

// From `packed` to the pages of dst, unless they are written.
const char* scatter(const Moves& moves, Stream stream);

// Numbers of the tokens that stay: gather to m.numbers, then scatter to the slots of dst.
const char* move_side(const Moves& moves, Stream stream);

} // namespace entropykv::cuda

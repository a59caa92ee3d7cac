// SPDX-License-Identifier: Apache-2.0
// What a block of query rows gives to each token: once over the tokens for each row's maximum and
// sum, and once more for the weights, which are added up over the rows.
#pragma once

#include "attention.h"

namespace {

// Each row's maximum and sum, of the tokens so far.
struct Normalize {
  template <int format>
  static void step(Rows& rows, const Piece& piece, const Piece*, bool causal) {
    for (int r = 0; r < rows.count; ++r) {
      const int limit = visible(rows, piece, causal, r);
      const float most = limit ? finish_logits<format>(rows, r, limit) : -kInfinity;
      if (most == -kInfinity) continue;
      const float before = rows.state.max[r], now = most > before ? most : before;
      const float* logits = rows.s.logits + r * kMaxTokens;
      vf total = set1(0);
      for (int t = 0; t < limit; t += 16)
        total = total + exp_negative(load(logits + t) - set1(now));
      rows.state.max[r] = now;
      rows.state.sum[r] = rows.state.sum[r] * exp_negative(before - now) + sum(total);
    }
  }
};

// The weights of all rows, whose sums have become factors, to the slots of the tokens.
struct Spread {
  template <int format>
  static void step(Rows& rows, const Piece& piece, const Piece*, bool causal) {
    float* columns = rows.s.columns;
    memset(columns, 0, sizeof rows.s.columns);
    for (int r = 0; r < rows.count; ++r) {
      const int limit = visible(rows, piece, causal, r);
      const vf most = set1(rows.state.max[r]), factor = set1(rows.state.sum[r]);
      for (int t = 0; t < limit; t += 16) {
        const vf weight = exp_negative(finished<format>(rows, r, t, limit) - most);
        store(columns + t, fma(weight, factor, load(columns + t)));
      }
    }
    for (int i = 0; i < piece.run_count; ++i) {
      const Run& run = piece.runs[i];
      float* slots = slots_of(*rows.mass, run.page, rows.work.head) + run.place;
      for (int t = 0; t < run.tokens; ++t) slots[t] += columns[run.first + t];
    }
  }
};

template <class Step> static void walk_all(Rows& rows) {
  const int hot = rows.work.position + rows.work.queries;
  const int splits =
      entropykv::cold_splits(rows.call.cache, rows.work.cold_pages) + entropykv::hot_splits(hot);
  for (rows.work.split = 0; rows.work.split < splits; ++rows.work.split) walk_split<Step>(rows);
}

static void observe(const Attention& call, const Work& work, const Slots& mass, const float* sinks,
                    void* scratch) {
  float most[kMaxRows], total[kMaxRows];
  Scratch& s = *static_cast<Scratch*>(scratch);
  Rows rows{work.queries * call.group,
            call.group,
            call.cache.head_size,
            call,
            work,
            Partial{most, total, nullptr},
            s,
            &mass};
  for (int r = 0; r < rows.count; ++r) {
    most[r] = -kInfinity;
    total[r] = 0;
  }
  read_queries(rows);
  walk_all<Normalize>(rows);
  for (int r = 0; r < rows.count; ++r) {
    const float* sink = sinks ? sinks + r % call.group : nullptr;
    total[r] = normalizer(most[r], total[r], sink) / float(call.group);
  }
  walk_all<Spread>(rows);
}

} // namespace

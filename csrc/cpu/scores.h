// SPDX-License-Identifier: Apache-2.0
// Attention-free scores of the tokens of a segment, higher = keep; the formulas and their sources
// are in entropykv_vllm/kernels/scores.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

constexpr float kEps = 1e-12f;
constexpr float kFloatMax = 3.40282347e38f;
constexpr int kNeighbours = 5;

EKV_INLINE float clamp_length(float square) {
  const float x = __builtin_sqrtf(square);
  return x < kEps ? kEps : x > kFloatMax ? kFloatMax : x;
}

static float dot(const float* a, const float* b, int n) {
  vf total = set1(0);
  for (int d = 0; d < n; d += 16) total = fma(load(a + d), load(b + d), total);
  return sum(total);
}

static float length(const float* x, int n) {
  return clamp_length(dot(x, x, n));
}

// -cos(k, mean of the unit keys).
static void keydiff(const float* keys, int tokens, int D, float* out) {
  float anchor[entropykv::kMaxHead] = {0};
  for (int t = 0; t < tokens; ++t) {
    const float* key = keys + int64_t{t} * D;
    out[t] = 1 / length(key, D);
    for (int d = 0; d < D; d += 16)
      store(anchor + d, fma(load(key + d), set1(out[t]), load(anchor + d)));
  }
  const float shrink = 1 / length(anchor, D);
  for (int t = 0; t < tokens; ++t) out[t] *= -shrink * dot(keys + int64_t{t} * D, anchor, D);
}

// Moving average; tokens at an edge divide by fewer neighbours.
static void neighbourhood(float* scores, int tokens) {
  constexpr int half = kNeighbours / 2;
  float before[half] = {0};
  for (int t = 0; t < tokens; ++t) {
    const int begin = t < half ? 0 : t - half, end = t + half + 1 > tokens ? tokens : t + half + 1;
    float total = 0;
    for (int i = begin; i < end; ++i) total += i < t ? before[(i + half) % half] : scores[i];
    before[t % half] = scores[t];
    scores[t] = total / float(end - begin);
  }
}

static void distinct_values(const float* keys, const float* values, int tokens, int D, float* out) {
  keydiff(keys, tokens, D, out);
  for (int t = 0; t < tokens; ++t) {
    const float distinct = 1 + out[t];
    out[t] = (distinct > 0 ? distinct : 0) * length(values + int64_t{t} * D, D);
  }
  neighbourhood(out, tokens);
}

// A hash of the key's bits.
static float random_score(const float* key, int D) {
  uint64_t mixed = 0;
  for (int d = 0; d < D; ++d)
    mixed +=
        uint64_t(int64_t{load_as<int32_t>(key + d)}) * (uint64_t(2 * d + 1) * 0x9E3779B97F4A7C15u);
  for (int i = 0; i < 2; ++i)
    mixed = (mixed ^ uint64_t(int64_t(mixed) >> 33)) * 0xFF51AFD7ED558CCDu;
  return float((mixed >> 40) & 0xFFFFFF) / 16777216.0f;
}

static void score(int policy, const float* keys, const float* values, int tokens, int D,
                  float* out) {
  if (policy == entropykv::kEntropykv) return distinct_values(keys, values, tokens, D, out);
  if (policy == entropykv::kKeydiff) return keydiff(keys, tokens, D, out);
  for (int t = 0; t < tokens; ++t) {
    const float* key = keys + int64_t{t} * D;
    const float* value = values + int64_t{t} * D;
    switch (policy) {
    case entropykv::kNorm: out[t] = length(value, D) / length(key, D); break;
    case entropykv::kKnorm: out[t] = -length(key, D); break;
    case entropykv::kRandom: out[t] = random_score(key, D); break;
    default: out[t] = -float(t);
    }
  }
}

} // namespace

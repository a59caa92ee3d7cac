// SPDX-License-Identifier: Apache-2.0
// Which tokens stay, given their scores; as entropykv_vllm/kernels/select.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace entropykv {

// Indices of the `keep` best in ascending order: the first `protect` always, then the highest
// scores, of equal ones the earlier, and NaN last.
inline std::vector<int> best(const float* scores, int count, int keep, int protect) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    if (a < protect || b < protect) return a < protect && b >= protect;
    if (std::isnan(scores[a]) || std::isnan(scores[b])) return !std::isnan(scores[a]);
    return scores[a] > scores[b];
  });
  order.resize(keep);
  std::sort(order.begin(), order.end());
  return order;
}

// The same in whole runs of tokens by their mean score.
inline std::vector<int> best_runs(const float* scores, int count, int keep, int protect, int run) {
  if (run == 1) return best(scores, count, keep, protect);
  std::vector<float> means(count / run);
  for (size_t i = 0; i < means.size(); ++i)
    means[i] = std::accumulate(scores + i * run, scores + (i + 1) * run, 0.0f) / float(run);
  std::vector<int> kept;
  for (int i : best(means.data(), int(means.size()), keep / run, (protect + run - 1) / run))
    for (int t = 0; t < run; ++t) kept.push_back(i * run + t);
  return kept;
}

// Zero mean and unit variance over the finite scores.
inline void standardize(float* scores, int count) {
  double sum = 0, square = 0;
  int finite = 0;
  for (int i = 0; i < count; ++i)
    if (std::isfinite(scores[i])) sum += scores[i], ++finite;
  const float mean = float(sum / std::max(finite, 1));
  for (int i = 0; i < count; ++i) {
    scores[i] -= mean;
    if (std::isfinite(scores[i])) square += double(scores[i]) * scores[i];
  }
  const float deviation = std::max(float(std::sqrt(square / std::max(finite, 1))), 1e-12f);
  for (int i = 0; i < count; ++i) scores[i] /= deviation;
}

} // namespace entropykv

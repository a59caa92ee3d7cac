// SPDX-License-Identifier: Apache-2.0
// The scores that kernels know; entropykv_vllm/kernels/scores has their formulas.
#pragma once

namespace entropykv {

enum Policy { kEntropykv, kNorm, kKnorm, kKeydiff, kRandom, kPosition };

} // namespace entropykv

// SPDX-License-Identifier: Apache-2.0
// New tokens to hot pages, and pages that were made beside them to where they belong.
#include "formats.cuh"

namespace entropykv::cuda {
namespace {

__device__ void load_any(const uint8_t* from, int type, float x[8]) {
  if (type == kFloat32) {
    Eight<kHot32>{load<float4>(from), load<float4>(from + 16)}.get(x);
  } else if (type == kBFloat16) {
    Eight<kHotB16>{load<uint4>(from)}.get(x);
  } else {
    Eight<kHot16>{load<uint4>(from)}.get(x);
  }
}

__device__ void store_any(uint8_t* to, int type, const float x[8]) {
  if (type == kFloat32) {
    store(to, make_float4(x[0], x[1], x[2], x[3]));
    store(to + 16, make_float4(x[4], x[5], x[6], x[7]));
    return;
  }
  unsigned words[4];
  EKV_UNROLL for (int i = 0; i < 4; ++i) {
    const float low = x[2 * i], high = x[2 * i + 1];
    words[i] = type == kBFloat16 ? bfloat_of_float(low) | bfloat_of_float(high) << 16
                                 : half_of_float(low) | half_of_float(high) << 16;
  }
  store(to, make_uint4(words[0], words[1], words[2], words[3]));
}

// A row of the block for each of a token's heads, keys and values.
__global__ void write_kernel(EKV_PARAMETER Write w) {
  const Lanes lanes(w.head_size);
  const int64_t row = int64_t{blockIdx.x} * lanes.rows + lanes.row;
  const int64_t token = row / (2 * w.heads);
  if (token >= w.tokens || !lanes.busy) return;
  const int64_t slot = w.slots[token];
  if (slot < 0) return;
  const int head = int(row % (2 * w.heads)) / 2, side = int(row % 2);
  const uint8_t* from =
      side == kKeys ? w.key + token * w.key_stride : w.value + token * w.value_stride;
  uint8_t* to = w.cache + slot / w.page * w.page_bytes + head * w.head_bytes;
  const int64_t at = hot_at(w.head_size, int(slot % w.page), Side(side), lanes.unit);
  float x[8];
  load_any(from + (int64_t{head} * w.head_size + 8 * lanes.unit) * item_bytes(w.type), w.type, x);
  store_any(to + at * item_bytes(w.cache_type), w.cache_type, x);
}

// A block for each page and head.
__global__ void scatter_kernel(EKV_PARAMETER Moves m) {
  const int64_t at = blockIdx.x / m.into;
  const int page = int(blockIdx.x % m.into);
  const Row row(m, at);
  const uint8_t* from = made(m, row, at, page);
  uint8_t* to = target(m, row, page);
  for (int64_t i = 16 * int64_t{threadIdx.x}; i < m.used; i += 16 * kThreads)
    store(to + i, load<uint4>(from + i));
}

__device__ float* slots(const Moves& m, const Row& row, int64_t page) {
  return m.side[row.layer] + page * m.side_page + row.head * m.side_head;
}

// A block for each row.
__global__ void gather_side_kernel(EKV_PARAMETER Moves m) {
  const Row row(m, blockIdx.x);
  for (int i = threadIdx.x; i < m.keep(); i += kThreads) {
    const int t = kept_token(m, blockIdx.x, i), page = t / m.page_tokens;
    const float* from = slots(m, row, m.src[int64_t{row.move} * m.from + page]);
    m.numbers[int64_t{blockIdx.x} * m.keep() + i] = from[t - page * m.page_tokens];
  }
}

__global__ void scatter_side_kernel(EKV_PARAMETER Moves m) {
  const Row row(m, blockIdx.x);
  const int tokens = m.pages.cold_tokens;
  for (int i = threadIdx.x; i < m.keep(); i += kThreads) {
    float* to = slots(m, row, m.dst[int64_t{row.move} * m.into + i / tokens]);
    to[i % tokens] = m.numbers[int64_t{blockIdx.x} * m.keep() + i];
  }
}

} // namespace

const char* write_tokens(const Write& write, Stream stream) {
  int lanes = 2;
  while (lanes * 8 < write.head_size) lanes *= 2;
  const int64_t rows = write.tokens * write.heads * 2, of_block = kThreads / lanes;
  if (rows) EKV_LAUNCH(write_kernel, (rows + of_block - 1) / of_block, 0, stream, write);
  return launched();
}

const char* scatter(const Moves& moves, Stream stream) {
  if (!moves.apart) EKV_LAUNCH(scatter_kernel, moves.rows() * moves.into, 0, stream, moves);
  return launched();
}

const char* move_side(const Moves& moves, Stream stream) {
  if (!moves.numbers) return nullptr;
  EKV_LAUNCH(gather_side_kernel, moves.rows(), 0, stream, moves);
  EKV_LAUNCH(scatter_side_kernel, moves.rows(), 0, stream, moves);
  return launched();
}

} // namespace entropykv::cuda

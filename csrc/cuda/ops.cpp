// SPDX-License-Identifier: Apache-2.0
// The torch operators of GPUs: checks, memory for in between, and the kernels in their order. Only
// torch's stable ABI is used. With EKV_EMULATED they run on CPU tensors, for tests.
#include <Python.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../stable_checks.h"
#include "kernels.h"

#ifdef EKV_EMULATED
#define EKV_NAMESPACE entropykv_emulated
#define EKV_DEVICE CPU
#define EKV_MODULE PyInit__emulated
#else
#define EKV_NAMESPACE entropykv
#define EKV_DEVICE CUDA
#define EKV_MODULE PyInit__C_cuda
// Weak, so that the library loads, and can say what is missing, where torch is one for CPUs.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace entropykv::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Memory for in between that one launch may take; more moves go one part after the other.
#ifndef EKV_MOST_BYTES
#define EKV_MOST_BYTES (int64_t{64} << 20)
#endif

// The device of the tensors for as long as this lives, and its stream.
#ifdef EKV_EMULATED
struct Device {
  Stream stream = nullptr;
  explicit Device(const Tensor&) {}
};
#else
struct Device {
  torch::stable::accelerator::DeviceGuard guard;
  Stream stream = nullptr;
  explicit Device(const Tensor& t) : guard(t.get_device_index()) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream, "entropykv: this torch has no CUDA");
    // Checked by hand: torch's macro for it has another name in each version.
    STD_TORCH_CHECK(!aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream),
                    "entropykv: torch does not tell its current stream");
  }
};
#endif

void check(const char* error) {
  STD_TORCH_CHECK(!error, "entropykv: CUDA says: ", error);
}

void check_device(const Tensor& t, const Tensor& cache, const char* name) {
  STD_TORCH_CHECK(t.device() == cache.device(), "entropykv: ", name,
                  " must be on the device of the cache");
}

const int64_t* integers(const Tensor& t, const Tensor& cache, int64_t dim, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Long && t.dim() == dim && t.is_contiguous(),
                  "entropykv: ", name, " must be contiguous, int64 and of ", dim, " dimensions");
  check_device(t, cache, name);
  return static_cast<const int64_t*>(t.const_data_ptr());
}

// The address of a tensor whose rows are `step` bytes apart; vectors of 16 bytes must fit.
uint8_t* aligned(const Tensor& t, int64_t step, const char* name) {
  auto* data = static_cast<uint8_t*>(t.mutable_data_ptr());
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0 && step % 16 == 0,
                  "entropykv: ", name, " must begin at multiples of 16 bytes");
  return data;
}

bool alike(const Tensor& a, const Tensor& b) {
  if (a.dim() != b.dim() || a.scalar_type() != b.scalar_type()) return false;
  for (int64_t i = 0; i < a.dim(); ++i)
    if (a.size(i) != b.size(i) || (a.size(i) > 1 && a.stride(i) != b.stride(i))) return false;
  return a.device() == b.device();
}

void check_alike(const std::vector<Tensor>& tensors, const char* name) {
  for (const Tensor& t : tensors)
    STD_TORCH_CHECK(alike(t, tensors[0]), "entropykv: ", name,
                    " of a call have one shape, type, device and strides");
}

// -- write --

void write(const Tensor& key, const Tensor& value, const Tensor& cache, const Tensor& slots) {
  const Geometry p = geometry_of(cache, 16);
  Write w{};
  w.type = type_of(key);
  for (const Tensor* t : {&key, &value}) {
    STD_TORCH_CHECK(
        t->dim() == 3 && t->size(1) == p.heads && t->size(2) == p.head_size && t->stride(2) == 1 &&
            heads_are_apart(*t, p.head_size) && type_of(*t) == w.type,
        "entropykv: keys and values are [tokens, heads, head size], heads side by side");
    STD_TORCH_CHECK(t->size(0) >= slots.numel(), "entropykv: more slots than tokens");
    check_device(*t, cache, "keys and values");
  }
  w.slots = integers(slots, cache, 1, "slots");
  check_apart({&slots}, cache);
  w.tokens = slots.numel();
  w.key_stride = step_of(key, item_bytes(w.type));
  w.value_stride = step_of(value, item_bytes(w.type));
  if (!w.tokens) return;
  w.key = aligned(key, w.key_stride, "keys");
  w.value = aligned(value, w.value_stride, "values");
  w.cache = aligned(cache, p.page_bytes, "pages");
  w.cache_type = p.type;
  w.page_bytes = p.page_bytes;
  w.head_bytes = p.head_bytes;
  w.heads = p.heads;
  w.head_size = p.head_size;
  w.page = p.page;
  const Device device(cache);
  check(write_tokens(w, device.stream));
}

// -- collapse and drop --

// A call: its moves on all layers, of which parts are launched.
struct Call {
  Moves moves{};
  int policy = kPosition;
  bool whole_pages = false;
  const std::vector<Tensor>&caches, &side;

  Call(const std::vector<Tensor>& caches_, const std::vector<Tensor>& side_, const Tensor& src,
       const Tensor& dst, const Tensor& sinks, int64_t from_bits, int64_t bits, bool apart)
      : caches(caches_), side(side_) {
    STD_TORCH_CHECK(!caches.empty(), "entropykv: no layers");
    check_alike(caches, "caches");
    Moves& m = moves;
    static_cast<Geometry&>(m.pages) = geometry_of(caches[0], bits);
    STD_TORCH_CHECK(from_bits == 16 || from_bits == bits, "entropykv: pages of ", from_bits,
                    " bits cannot become pages of ", bits);
    m.src = integers(src, caches[0], 2, "src");
    m.dst = integers(dst, caches[0], 2, "dst");
    m.sinks = integers(sinks, caches[0], 1, "sinks");
    STD_TORCH_CHECK(
        dst.size(0) == src.size(0) && sinks.numel() == src.size(0) && dst.size(1) >= 1 &&
            dst.size(1) <= src.size(1),
        "entropykv: src, dst and sinks have one row per move, and a move makes pages fewer");
    STD_TORCH_CHECK(src.size(0) <= kMostTokens &&
                        src.size(1) <= kMostTokens / std::max(m.pages.page, m.pages.cold_tokens),
                    "entropykv: a call has at most ", kMostTokens,
                    " moves, and a move as many tokens");
    for (const auto* written : {&caches, &side})
      for (const Tensor& t : *written) check_apart({&src, &dst, &sinks}, t);
    m.moves = int(src.size(0));
    m.from = int(src.size(1));
    m.into = int(dst.size(1));
    m.format = from_bits == 8 ? kCold8 : from_bits == 4 ? kCold4 : m.pages.type;
    m.page_tokens = from_bits == 16 ? m.pages.page : m.pages.cold_tokens;
    m.run = 1;
    m.apart = apart;
    m.used = bits == 16 ? m.pages.head_bytes
                        : ColdLayout{m.pages.head_size, m.pages.cold_tokens, int(bits)}.bytes();
    take_side();
  }

  void take_side() {
    if (side.empty()) return;
    const Tensor &table = side[0], &cache = caches[0];
    const int slots = std::max(moves.page_tokens, moves.pages.cold_tokens);
    STD_TORCH_CHECK(
        side.size() == caches.size() && table.scalar_type() == ScalarType::Float &&
            table.dim() == 3 && table.size(0) == cache.size(0) && table.size(1) == cache.size(1) &&
            table.size(2) >= slots && table.stride(2) == 1,
        "entropykv: side is float32 [pages, heads, slots] for each layer, with at least ", slots,
        " slots, those of a page and head side by side");
    check_alike(side, "side");
    check_device(table, cache, "side");
    moves.side_page = table.stride(0);
    moves.side_head = table.stride(1);
  }

  void score_by(const std::string& name, const std::optional<Tensor>& scores) {
    if (!scores) {
      policy = policy_of(name);
      return;
    }
    const Moves& m = moves;
    STD_TORCH_CHECK(
        scores->scalar_type() == ScalarType::Float && scores->dim() == 4 &&
            scores->is_contiguous() && scores->size(0) == int64_t(caches.size()) &&
            scores->size(1) == m.moves && scores->size(2) == m.pages.heads &&
            scores->size(3) == m.tokens(),
        "entropykv: scores are float32 [layers, moves, heads, tokens of src], contiguous");
    check_device(*scores, caches[0], "scores");
    moves.scores = static_cast<const float*>(scores->const_data_ptr());
  }

  // Numbers per row of what lies between the kernels.
  bool chooses() const {
    return moves.keep() < moves.tokens() && (moves.scores || policy != kPosition);
  }
  int64_t row_floats() const {
    return (chooses() ? 3 * int64_t{moves.tokens()} + moves.keep() : 0) +
           (side.empty() ? 0 : moves.keep());
  }
  int64_t row_bytes() const {
    return (moves.apart ? 0 : moves.into * moves.used) + 4 * row_floats();
  }

  // Some moves on some layers, in memory of their own.
  Moves part(int first_layer, int first_move, int layers, int count) const {
    Moves m = moves;
    m.pages.layers = layers;
    for (int i = 0; i < layers; ++i) {
      const size_t layer = first_layer + i;
      m.pages.cache[i] = aligned(caches[layer], m.pages.page_bytes, "pages");
      if (!side.empty()) m.side[i] = static_cast<float*>(side[layer].mutable_data_ptr());
    }
    m.src += int64_t{first_move} * m.from;
    m.dst += int64_t{first_move} * m.into;
    m.sinks += first_move;
    m.moves = count;
    const int64_t of_move = int64_t{m.pages.heads} * m.tokens();
    m.score_stride = of_move * moves.moves;
    if (m.scores) m.scores += first_layer * m.score_stride + first_move * of_move;
    return m;
  }

  // Scores and choice, if there are any; `floats` is what is left of the memory.
  void choose(Moves& m, float*& floats, Stream stream) const {
    if (!chooses()) return;
    const auto take = [&](int64_t count) { return std::exchange(floats, floats + count); };
    const int64_t tokens = m.rows() * m.tokens();
    float *scores = take(tokens), *raw = take(tokens), *means = take(tokens);
    auto* best = reinterpret_cast<int*>(take(m.rows() * m.keep()));
    if (!m.scores) {
      check(score(m, policy, scores, raw, stream));
      m.scores = scores;
      m.score_stride = int64_t{m.moves} * m.pages.heads * m.tokens();
    }
    // The raw scores are not needed any more.
    check(select(m, best, raw, means, stream));
    m.best = best;
  }

  void launch(Moves m, const Tensor& memory, Stream stream) const {
    m.packed = static_cast<uint8_t*>(memory.mutable_data_ptr());
    auto* floats = reinterpret_cast<float*>(m.packed + (m.apart ? 0 : m.rows() * m.into * m.used));
    choose(m, floats, stream);
    if (!side.empty()) m.numbers = floats;
    check(whole_pages ? gather_pages(m, stream) : gather(m, stream));
    check(scatter(m, stream));
    check(move_side(m, stream));
  }

  void run() const {
    if (!moves.moves) return;
    const Device device(caches[0]);
    const int all = int(caches.size()), layers = std::min(all, kMaxLayers);
    const int64_t of_move = std::max<int64_t>(layers * moves.pages.heads * row_bytes(), 1);
    const int most = int(std::clamp<int64_t>(EKV_MOST_BYTES / of_move, 1, moves.moves));
    const Tensor memory = torch::stable::new_empty(caches[0], {most * of_move}, ScalarType::Byte);
#ifdef EKV_EMULATED
    std::fill_n(static_cast<uint8_t*>(memory.mutable_data_ptr()), most * of_move, 0xFF);
#endif
    for (int layer = 0; layer < all; layer += layers)
      for (int move = 0; move < moves.moves; move += most)
        launch(part(layer, move, std::min(layers, all - layer), std::min(most, moves.moves - move)),
               memory, device.stream);
  }
};

void collapse(std::vector<Tensor> caches, const Tensor& src, const Tensor& dst, const Tensor& sinks,
              Word policy, Word granularity, Word scope, int64_t from_bits, int64_t bits,
              bool apart, std::optional<Tensor> scores, std::vector<Tensor> side) {
  Call call(caches, side, src, dst, sinks, from_bits, bits, apart);
  call.score_by(policy, scores);
  Moves& m = call.moves;
  STD_TORCH_CHECK(m.keep() <= m.tokens(), "entropykv: ", m.from, " pages do not fill ", m.into,
                  " cold ones");
  STD_TORCH_CHECK((granularity == "token" || granularity == "block") &&
                      (scope == "head" || scope == "layer"),
                  "entropykv: granularity is token or block and scope is head or layer");
  if (granularity == "block") m.run = int(gcd(16, m.keep()));
  m.by_layer = scope == "layer";
  call.run();
}

void drop(std::vector<Tensor> caches, const Tensor& src, const Tensor& dst, const Tensor& sinks,
          Word policy, int64_t bits, bool apart, std::optional<Tensor> scores,
          std::vector<Tensor> side) {
  Call call(caches, side, src, dst, sinks, bits, bits, apart);
  call.score_by(policy, scores);
  call.moves.run = call.moves.page_tokens;
  call.moves.used = call.moves.pages.head_bytes;
  call.whole_pages = true;
  call.run();
}

} // namespace
} // namespace entropykv::cuda

STABLE_TORCH_LIBRARY_FRAGMENT(EKV_NAMESPACE, m) {
  m.def("cuda_write(Tensor key, Tensor value, Tensor(a!) cache, Tensor slots) -> ()");
  m.def("cuda_collapse(Tensor(a!)[] caches, Tensor src, Tensor dst, Tensor sinks, str policy, str "
        "granularity, str scope, int from_bits, int bits, bool apart, Tensor? scores, "
        "Tensor(b!)[] side) -> ()");
  m.def("cuda_drop(Tensor(a!)[] caches, Tensor src, Tensor dst, Tensor sinks, str policy, int "
        "bits, bool apart, Tensor? scores, Tensor(b!)[] side) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(EKV_NAMESPACE, EKV_DEVICE, m) {
  m.impl("cuda_write", TORCH_BOX(&entropykv::cuda::write));
  m.impl("cuda_collapse", TORCH_BOX(&entropykv::cuda::collapse));
  m.impl("cuda_drop", TORCH_BOX(&entropykv::cuda::drop));
}

PyMODINIT_FUNC EKV_MODULE(void) {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "entropykv", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}

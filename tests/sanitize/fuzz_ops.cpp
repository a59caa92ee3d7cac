// SPDX-License-Identifier: Apache-2.0
// Bytes become a call that is right, of which up to four arguments are then made odd or wrong. The
// operator must refuse it in words of its own, or carry it out; the sanitizers see the rest.
#include <fuzzer/FuzzedDataProvider.h>

#include <stdio.h>
#include <unistd.h>

#include <filesystem>

#include "calls.h"

namespace {

using calls::Argument;
using calls::Arguments;
using calls::ScalarType;
using calls::Tensor;

constexpr int64_t kOdd[] = {0,
                            1,
                            -1,
                            2,
                            3,
                            15,
                            17,
                            33,
                            1 << 16,
                            INT32_MAX,
                            INT32_MIN,
                            (int64_t{1} << 32) + 1,
                            1LL << 40,
                            1LL << 59,
                            INT64_MAX,
                            INT64_MIN,
                            (1LL << 32) + 2,
                            48,
                            64,
                            -2};

int64_t odd(FuzzedDataProvider& data) {
  return data.PickValueInArray(kOdd);
}

// One of the integers is another one, often one near it.
void another_number(FuzzedDataProvider& data, Tensor& t) {
  if (t.integers.empty()) return;
  int64_t& number = t.integers[data.ConsumeIntegralInRange<size_t>(0, t.integers.size() - 1)];
  const bool near = data.ConsumeBool() && number > INT32_MIN && number < INT32_MAX;
  number = near ? number + data.ConsumeIntegralInRange<int>(-3, 3) : odd(data);
}

// One dimension, changed in a way that torch can.
void another_dimension(FuzzedDataProvider& data, Tensor& t) {
  const int64_t dims = int64_t(t.sizes.size());
  if (dims == 0) return;
  const int64_t i = data.ConsumeIntegralInRange<int64_t>(0, dims - 1);
  int64_t &size = t.sizes[i], &stride = t.strides[i];
  switch (data.ConsumeIntegralInRange<int>(0, 6)) {
  case 0: size = data.ConsumeIntegralInRange<int64_t>(0, size); break; // its first part
  case 1: stride = 0, size = std::max<int64_t>(odd(data), 0); break;   // one, expanded
  case 2: stride = std::max<int64_t>(odd(data), 0); break;
  case 3: stride = std::min<int64_t>(stride, 1 << 20) * 2, size /= 2; break; // every other one
  case 4: std::swap(size, t.sizes[dims - 1]), std::swap(stride, t.strides[dims - 1]); break;
  case 5: size = std::max<int64_t>(odd(data), 0), t.sizes[0] = 0; break; // of nothing
  case 6:
    size = data.ConsumeIntegralInRange<int64_t>(0, 80), t.strides = calls::strides_of(t.sizes);
  }
}

// One dimension more, or fewer.
void other_dimensions(FuzzedDataProvider& data, Tensor& t) {
  if (data.ConsumeBool() && !t.sizes.empty())
    t.sizes.pop_back(), t.strides.pop_back();
  else
    t.sizes.insert(t.sizes.begin(), 1), t.strides.insert(t.strides.begin(), 1);
}

void other_type(FuzzedDataProvider& data, Tensor& t) {
  constexpr ScalarType types[] = {ScalarType::Float,  ScalarType::Half, ScalarType::BFloat16,
                                  ScalarType::Double, ScalarType::Int,  ScalarType::Long,
                                  ScalarType::Byte};
  t.type = data.PickValueInArray(types);
}

void spoil(FuzzedDataProvider& data, Arguments& all, Tensor& t) {
  if (t.whole() && data.ConsumeBool()) return another_number(data, t);
  switch (data.ConsumeIntegralInRange<int>(1, 5)) {
  case 1: return another_dimension(data, t);
  case 2: return other_dimensions(data, t);
  case 3: return other_type(data, t);
  case 4: t.offset = data.ConsumeIntegralInRange<int>(0, 9); return;
  case 5: t.inside = data.ConsumeIntegralInRange<int>(0, int(all.size()) - 1);
  }
}

void spoil(FuzzedDataProvider& data, Arguments& all) {
  Argument& a = all[data.ConsumeIntegralInRange<size_t>(0, all.size() - 1)];
  if (auto* t = std::get_if<Tensor>(&a.value)) return spoil(data, all, *t);
  if (std::holds_alternative<int64_t>(a.value)) a.value = odd(data);
  if (std::holds_alternative<double>(a.value)) a.value = data.ConsumeFloatingPoint<double>();
  if (std::holds_alternative<std::string>(a.value)) a.value = data.ConsumeRandomLengthString(9);
}

bool too_large(const Arguments& all) {
  return std::any_of(all.begin(), all.end(), [](const Argument& a) {
    const auto* t = std::get_if<Tensor>(&a.value);
    return t && calls::bytes_of(*t) > calls::kMostBytes;
  });
}

// Numbers of any size, NaN and infinities among them, or small ones.
void fill(FuzzedDataProvider& data, uint8_t* to, int64_t bytes) {
  uint64_t state = data.ConsumeIntegral<uint8_t>();
  const uint64_t mask = state % 2 ? ~uint64_t{0} : 0x3fff3fff3fff3fff;
  for (int64_t i = 0; i < bytes; i += 8) {
    state = state * 6364136223846793005 + 1442695040888963407;
    const uint64_t word = (state ^ state >> 29) & mask;
    memcpy(to + i, &word, size_t(std::min<int64_t>(8, bytes - i)));
  }
}

struct Count {
  uint64_t accepted, refused;
} counts[calls::kCount];

bool fuzzes; // or plays files again, which need not have calls of each kind

// Calls that are all refused, or never, would find nothing.
void report() {
  bool all = true;
  for (int i = 0; i < calls::kCount; ++i) {
    const Count& n = counts[i];
    fprintf(stderr, "%-9s %9zu accepted %9zu refused\n", calls::kKinds[i].name, n.accepted,
            n.refused);
    all = all && n.accepted && n.refused;
  }
  if (all || !fuzzes) return;
  fprintf(stderr, "an operator was never called right, or never wrong\n");
  _exit(1);
}

} // namespace

extern "C" int LLVMFuzzerInitialize(int* count, char*** words) {
  fuzzes = std::filesystem::is_directory((*words)[*count - 1]); // where its inputs are kept
  atexit(report);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  FuzzedDataProvider data(bytes, size);
  const int which = data.ConsumeIntegralInRange<int>(0, calls::kCount - 1);
  const calls::Pick pick = [&](int64_t low, int64_t high) {
    return data.ConsumeIntegralInRange<int64_t>(low, high);
  };
  constexpr const char* isas[] = {"", "generic", "avx2", "avx512", "avx512_bf16", "amx_emulated"};
  calls::use("generic"); // for where the other one is not there
  calls::use(data.PickValueInArray(isas));
  stable::threads = data.ConsumeBool() ? 1 : 8;
  const int wrong = data.ConsumeIntegralInRange<int>(0, 4); // before short inputs end
  Arguments all = calls::kKinds[which].right(pick);
  for (int i = 0; i < wrong; ++i) spoil(data, all);
  if (too_large(all)) return 0;
  calls::Call call(all, [&](uint8_t* to, int64_t n) { fill(data, to, n); });
  const auto refusal = call.run(calls::kKinds[which].name);
  ++(refusal ? counts[which].refused : counts[which].accepted);
  if (refusal && refusal->find("entropykv: ") == std::string::npos) {
    fprintf(stderr, "%s is refused in another's words: %s\n", calls::kKinds[which].name,
            refusal->c_str());
    abort();
  }
  return 0;
}

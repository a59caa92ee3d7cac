// SPDX-License-Identifier: Apache-2.0
// The operators on several threads, for ThreadSanitizer. torch's own threads are OpenMP's, whose
// barriers it does not see; these are those of the standard library. `threads race` makes a race
// that it must find.
#include <stdio.h>

#include <random>
#include <thread>

#include "calls.h"

namespace {

constexpr int kCalls = 60;

class Numbers {
public:
  explicit Numbers(unsigned seed) : random_(seed) {}
  int64_t operator()(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

private:
  std::mt19937 random_;
};

void fill(uint8_t* to, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) to[i] = uint8_t(i * 37 % 59); // no NaN
}

// Of one kind, until as many as that were carried out.
void carry_out(const calls::Kind& kind, unsigned seed, int count) {
  Numbers numbers(seed);
  while (count > 0) {
    calls::Call call(kind.right(std::ref(numbers)), fill);
    if (!call.run(kind.name)) --count;
  }
}

// All kinds at once, the first of them before an instruction set was chosen.
void several_callers() {
  std::vector<std::thread> callers;
  for (int i = 0; i < calls::kCount; ++i) callers.emplace_back(carry_out, calls::kKinds[i], i, 5);
  for (std::thread& caller : callers) caller.join();
}

// Two calls that write to the same cache.
void race() {
  Numbers numbers(0);
  calls::Arguments all = calls::write(std::ref(numbers));
  while (std::get<calls::Tensor>(all[3].value).integers.empty())
    all = calls::write(std::ref(numbers));
  auto& slots = std::get<calls::Tensor>(all[3].value).integers;
  std::fill(slots.begin(), slots.end(), 0);
  calls::Call call(all, fill);
  const auto run = [&] { call.run("write"); };
  std::thread one(run), other(run);
  one.join(), other.join();
}

} // namespace

int main(int count, char** words) {
  stable::threads = 4;
  stable::beside = true;
  if (count > 1 && std::string(words[1]) == "race") return race(), 0;
  several_callers();
  for (const char* isa : {"generic", "avx2", "avx512", "avx512_bf16", "amx_emulated"}) {
    calls::use(isa);
    for (const calls::Kind& kind : calls::kKinds) carry_out(kind, 1, kCalls);
  }
  printf("no race in %d calls\n", kCalls * calls::kCount * 5);
}

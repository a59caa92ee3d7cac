// SPDX-License-Identifier: Apache-2.0
// Which instruction set's kernels run. ENTROPYKV_ISA may lower the choice, or ask for AMX.
#include "kernels.h"

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace entropykv {

extern const Kernels kGeneric;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512, kAvx512Bf16, kAmx, kAmxEmulated;
#endif

namespace {

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512bf16");
}
// Linux hands out the tile registers on request only.
bool has_amx() {
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;
  return has_avx512_bf16() && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif
bool always() {
  return true;
}

struct Choice {
  const char* name;
  const Kernels* table;
  bool (*supported)();
};

const Choice kChoices[] = {
    {"generic", &kGeneric, always},
#if defined(__x86_64__)
    {"avx2", &kAvx2, has_avx2},
    {"avx512", &kAvx512, has_avx512},
    {"avx512_bf16", &kAvx512Bf16, has_avx512_bf16},
    {"amx", &kAmx, has_amx},
#endif
};

// AMX has run on emulated tiles only so far, so it has to be asked for by name.
const Kernels* best(const char* limit) {
  const Kernels* found = &kGeneric;
  for (const Choice& choice : kChoices) {
    const bool named = limit && strcmp(choice.name, limit) == 0;
    if ((named || strcmp(choice.name, "amx") != 0) && choice.supported()) found = choice.table;
    if (named) break;
  }
  return found;
}

// Threads of the first call may ask for it at once.
std::atomic<const Kernels*> current{nullptr};

constexpr int kCount = sizeof kChoices / sizeof *kChoices;

} // namespace

const char* isa_name(int i) {
  return i < kCount ? kChoices[i].name : nullptr;
}

const Kernels& kernels() {
  const Kernels* found = current.load(std::memory_order_relaxed);
  if (!found) current = found = best(getenv("ENTROPYKV_ISA"));
  return *found;
}

bool set_isa(const char* name) {
#if defined(__x86_64__)
  if (strcmp(name, kAmxEmulated.name) == 0 && has_avx512_bf16()) {
    current = &kAmxEmulated; // for tests, so never the best
    return true;
  }
#endif
  const Kernels* found = best(*name ? name : getenv("ENTROPYKV_ISA"));
  if (*name && strcmp(found->name, name) != 0) return false;
  current = found;
  return true;
}

} // namespace entropykv

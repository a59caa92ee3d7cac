// SPDX-License-Identifier: Apache-2.0
// The table of one instruction set. A translation unit defines EKV_NAME and EKV_TABLE, and is
// compiled with that set's flags; it must not contain anything that a linker could share with
// another.
#include "observe.h"
#include "pages.h"
#include "scores.h"

namespace entropykv {
extern const Kernels EKV_TABLE;
const Kernels EKV_TABLE = {EKV_NAME,     scratch_bytes, attend,    merge, finish,    observe,
                           write_tokens, read_hot,      read_cold, score, write_page};
} // namespace entropykv

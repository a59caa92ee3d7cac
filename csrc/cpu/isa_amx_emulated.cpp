// SPDX-License-Identifier: Apache-2.0
// The AMX kernels with emulated tiles: for tests on machines without them.
#define EKV_NAME "amx_emulated"
#define EKV_TABLE kAmxEmulated
#define EKV_TILES
#define EKV_EMULATE_AMX
#include "isa.h"

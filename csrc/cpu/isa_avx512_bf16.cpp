// SPDX-License-Identifier: Apache-2.0
#define EKV_NAME "avx512_bf16"
#define EKV_TABLE kAvx512Bf16
#include "isa.h"

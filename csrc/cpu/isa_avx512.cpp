// SPDX-License-Identifier: Apache-2.0
#define EKV_NAME "avx512"
#define EKV_TABLE kAvx512
#include "isa.h"

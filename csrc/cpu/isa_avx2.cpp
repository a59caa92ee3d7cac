// SPDX-License-Identifier: Apache-2.0
#define EKV_NAME "avx2"
#define EKV_TABLE kAvx2
#include "isa.h"

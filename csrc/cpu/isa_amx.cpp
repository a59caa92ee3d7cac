// SPDX-License-Identifier: Apache-2.0
#define EKV_NAME "amx"
#define EKV_TABLE kAmx
#define EKV_TILES
#include "isa.h"

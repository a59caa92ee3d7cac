// SPDX-License-Identifier: Apache-2.0
#define EKV_NAME "generic"
#define EKV_TABLE kGeneric
#include "isa.h"

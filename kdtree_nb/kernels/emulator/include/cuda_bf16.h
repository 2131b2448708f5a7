// cuda_bf16.h: the emulator's __nv_bfloat16.
#pragma once

#include "narrow_float.h"

using EmulatorBfloat16 = emulator::Narrow<8, 7>;
EMULATOR_NARROW_FLOAT(__nv_bfloat16, __nv_bfloat162, bfloat16, EmulatorBfloat16)

using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
inline nv_bfloat162 make_bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return nv_bfloat162(x, y); }

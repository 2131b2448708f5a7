// cuda_fp16.h: the emulator's __half.
#pragma once

#include "narrow_float.h"

using EmulatorHalf = emulator::Narrow<5, 10>;
EMULATOR_NARROW_FLOAT(__half, __half2, half, EmulatorHalf)

using half = __half;
using half2 = __half2;
inline half2 make_half2(half x, half y) { return half2(x, y); }

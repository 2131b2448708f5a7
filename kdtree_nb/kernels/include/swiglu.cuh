// swiglu.cuh: silu(gate) · up.
#pragma once

__device__ __forceinline__ float swiglu_of(float gate, float up) { return gate * (1.0f / (1.0f + expf(-gate))) * up; }

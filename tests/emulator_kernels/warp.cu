// What the lanes of a warp exchange; one block, any number of threads.

template <class T> __device__ void shuffle_all(const T* x, T* y, int argument, int width)
{
    const int i = threadIdx.x, n = blockDim.x;
    y[i] = __shfl_sync(0xffffffffu, x[i], argument, width);
    y[n + i] = __shfl_up_sync(0xffffffffu, x[i], argument, width);
    y[2 * n + i] = __shfl_down_sync(0xffffffffu, x[i], argument, width);
    y[3 * n + i] = __shfl_xor_sync(0xffffffffu, x[i], argument, width);
}

extern "C" __global__ void shuffle_int(const int* x, int* y, int argument, int width)
{
    shuffle_all(x, y, argument, width);
}

extern "C" __global__ void shuffle_unsigned(const unsigned* x, unsigned* y, int argument, int width)
{
    shuffle_all(x, y, argument, width);
}

extern "C" __global__ void shuffle_float(const float* x, float* y, int argument, int width)
{
    shuffle_all(x, y, argument, width);
}

extern "C" __global__ void shuffle_long(const long long* x, long long* y, int argument, int width)
{
    shuffle_all(x, y, argument, width);
}

// A source for each lane.
extern "C" __global__ void gather(const float* x, const int* source, float* y)
{
    y[threadIdx.x] = __shfl_sync(0xffffffffu, x[threadIdx.x], source[threadIdx.x]);
}

extern "C" __global__ void votes(const int* x, unsigned* y, unsigned mask)
{
    const int i = threadIdx.x, n = blockDim.x;
    if (!(mask >> i % 32 & 1))
        return;
    y[i] = __ballot_sync(mask, x[i]);
    y[n + i] = __any_sync(mask, x[i]);
    y[2 * n + i] = __all_sync(mask, x[i]);
    y[3 * n + i] = __match_any_sync(mask, x[i]);
}

extern "C" __global__ void reductions(const int* x, int* y, unsigned mask)
{
    const int i = threadIdx.x, n = blockDim.x;
    if (!(mask >> i % 32 & 1))
        return;
    const unsigned bits = x[i];
    y[i] = __reduce_add_sync(mask, x[i]);
    y[n + i] = __reduce_min_sync(mask, x[i]);
    y[2 * n + i] = __reduce_max_sync(mask, x[i]);
    y[3 * n + i] = __reduce_min_sync(mask, bits);
    y[4 * n + i] = __reduce_max_sync(mask, bits);
    y[5 * n + i] = __reduce_and_sync(mask, bits);
    y[6 * n + i] = __reduce_or_sync(mask, bits);
    y[7 * n + i] = __reduce_xor_sync(mask, bits);
}

// The halves of a warp take different branches, and each has a sum of its own.
extern "C" __global__ void diverged(const int* x, int* y)
{
    int value = x[threadIdx.x];
    if (threadIdx.x % 32 < 16) {
        for (int step = 8; step > 0; step /= 2)
            value += __shfl_xor_sync(0x0000ffffu, value, step);
    } else {
        for (int step = 8; step > 0; step /= 2)
            value = max(value, __shfl_xor_sync(0xffff0000u, value, step));
    }
    y[threadIdx.x] = value;
}

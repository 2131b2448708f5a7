// Threads, blocks, barriers, shared memory, atomics.

// Where each thread is: y[grid z][grid y][grid x][block z][block y][block x] = its index in a block of one dimension.
extern "C" __global__ void indices(int* y, int* sizes)
{
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    y[block * (blockDim.x * blockDim.y * blockDim.z) + thread] = thread + 1000 * block;
    if (thread == 0 && block == 0) {
        const int all[7] = {int(gridDim.x), int(gridDim.y), int(gridDim.z), int(blockDim.x),
                            int(blockDim.y), int(blockDim.z), warpSize};
        for (int i = 0; i < 7; ++i)
            sizes[i] = all[i];
    }
}

// A row's sum by a tree in shared memory, static or dynamic.
extern "C" __global__ void row_sum(const float* x, float* y, int columns, int dynamic)
{
    extern __shared__ unsigned char dynamic_shared[];
    __shared__ float fixed[1024];
    float* part = dynamic ? reinterpret_cast<float*>(dynamic_shared) : fixed;
    const int i = threadIdx.x;
    float sum = 0.0f;
    for (int column = i; column < columns; column += blockDim.x)
        sum += x[blockIdx.x * columns + column];
    part[i] = sum;
    __syncthreads();
    for (int step = blockDim.x / 2; step > 0; step /= 2) {
        if (i < step)
            part[i] += part[i + step];
        __syncthreads();
    }
    if (i == 0)
        y[blockIdx.x] = part[0];
}

// The same, with barriers or with a race.
extern "C" __global__ void row_sum_race(const float* x, float* y, int columns)
{
    extern __shared__ unsigned char dynamic_shared[];
    float* part = reinterpret_cast<float*>(dynamic_shared);
    const int i = threadIdx.x;
    part[i] = i < columns ? x[blockIdx.x * columns + i] : 0.0f;
    for (int step = blockDim.x / 2; step > 0; step /= 2) {
#ifdef BARRIER
        __syncthreads();
#endif
        if (i < step)
            part[i] += part[i + step];
    }
    __syncthreads();
    if (i == 0)
        y[blockIdx.x] = part[0];
}

// A neighbour's value from before it was overwritten: right only if all read before anyone writes.
extern "C" __global__ void shift(int* y)
{
    __shared__ int values[1024];
    const int i = threadIdx.x, n = blockDim.x;
    values[i] = i;
    __syncthreads();
    const int left = values[(i + n - 1) % n];
#ifdef BARRIER
    __syncthreads();
#endif
    values[i] = left;
    __syncthreads();
    y[i] = values[i];
}

extern "C" __global__ void predicates(const int* x, int* y)
{
    const int i = threadIdx.x, n = blockDim.x;
    y[i] = __syncthreads_count(x[i]);
    y[n + i] = __syncthreads_or(x[i]);
    y[2 * n + i] = __syncthreads_and(x[i]);
}

// What shared memory holds at the start of a block; then something is written there for the next block to find.
extern "C" __global__ void leftovers(unsigned* y, int words)
{
    extern __shared__ unsigned char dynamic_shared[];
    __shared__ unsigned fixed[64];
    unsigned* dynamic = reinterpret_cast<unsigned*>(dynamic_shared);
    for (int i = threadIdx.x; i < words; i += blockDim.x) {
        y[(blockIdx.x * 2) * words + i] = fixed[i];
        y[(blockIdx.x * 2 + 1) * words + i] = dynamic[i];
        fixed[i] = dynamic[i] = 7;
    }
}

extern "C" __global__ void atomics(const int* x, int* ints, unsigned* words, float* floats, unsigned long long* longs)
{
    __shared__ int in_block;
    if (threadIdx.x == 0)
        in_block = 0;
    __syncthreads();
    const int value = x[blockIdx.x * blockDim.x + threadIdx.x];
    atomicAdd(&in_block, value);
    atomicMax(&ints[1], value);
    atomicMin(&ints[2], value);
    atomicOr(&words[0], 1u << (value & 31));
    atomicAnd(&words[1], ~(1u << (value & 31)));
    atomicXor(&words[2], unsigned(value));
    atomicInc(&words[3], 9u);
    atomicAdd(&floats[0], float(value));
    atomicAdd(&longs[0], (unsigned long long)(value & 0xff) << 32);
    int seen = ints[3], assumed;
    do {
        assumed = seen;
        seen = atomicCAS(&ints[3], assumed, assumed + (value & 3));
    } while (seen != assumed);
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(&ints[0], in_block);
        __threadfence();
        if (atomicAdd(&ints[4], 1) == int(gridDim.x) - 1)  // the last block
            ints[5] = atomicExch(&ints[4], -1);
    }
}

// A thread waits for another warp with __nanosleep, for a flag that warp 1 sets.
extern "C" __global__ void wait_for_flag(int* y)
{
    __shared__ int flag;
    if (threadIdx.x == 0)
        atomicExch(&flag, 0);
    __syncthreads();
    if (threadIdx.x >= 32)
        atomicExch(&flag, 1);
    else
        while (atomicAdd(&flag, 0) == 0)
            __nanosleep(20);
    y[threadIdx.x] = 1;
}

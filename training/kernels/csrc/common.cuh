// What every kernel shares: types, 16-byte loads and stores, reductions, and launching.
//
// A launcher is plain C: extern "C" int NAME(pointers…, int64_t sizes…, float…, int dtype, void* stream). It returns a
// cudaError_t. Arithmetic is float32; tensors are float32, float16 or bfloat16, by the codes of `DISPATCH`.

#pragma once

#include <cfloat>
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
#include "host.h"
#endif

#define DEVICE __device__ __forceinline__

// Types

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(__half x) { return __half2float(x); }
DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

DEVICE void from_float(float x, float& out) { out = x; }
DEVICE void from_float(float x, __half& out) { out = __float2half(x); }
DEVICE void from_float(float x, __nv_bfloat16& out) { out = __float2bfloat16(x); }

// Runs the statements with T as the type of a code, e.g. DISPATCH(dtype, return launch(kernel<T>, …)).
#define DISPATCH(dtype, ...)              \
    switch (dtype) {                      \
        case 0: {                         \
            using T = float;              \
            __VA_ARGS__;                  \
        } break;                          \
        case 1: {                         \
            using T = __half;             \
            __VA_ARGS__;                  \
        } break;                          \
        case 2: {                         \
            using T = __nv_bfloat16;      \
            __VA_ARGS__;                  \
        } break;                          \
        default:                          \
            return cudaErrorInvalidValue; \
    }

// Loads and stores of N neighbours at once: one access of N * sizeof(T) bytes, to which the address must be aligned.

template <typename T>
constexpr int PACK = 16 / sizeof(T);  // elements in 16 bytes

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
    T at[N];
};

template <int N, typename T>
DEVICE void load(const T* from, float (&values)[N]) {
    const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = to_float(pack.at[i]);
}

template <int N, typename T>
DEVICE void store(T* to, const float (&values)[N]) {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; ++i) from_float(values[i], pack.at[i]);
    *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// Whether rows of `columns` elements from `data` all begin at a multiple of 16 bytes.
template <typename T>
bool aligned(const void* data, int64_t columns = 0) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && columns % PACK<T> == 0;
}

// Reductions. `combine` takes two values to one; the order is fixed, so results repeat bitwise. Every thread gets the
// result. A type other than float needs its own `shuffle_xor`.

DEVICE float shuffle_xor(float value, int bits) { return __shfl_xor_sync(0xffffffffu, value, bits); }

template <typename V, typename Combine>
DEVICE V warp_reduce(V value, Combine combine) {
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) value = combine(value, shuffle_xor(value, bits));
    return value;
}

// For one-dimensional blocks of whole warps. `neutral` changes nothing when combined.
template <typename V, typename Combine>
DEVICE V block_reduce(V value, V neutral, Combine combine) {
    __shared__ V partial[32];  // one per warp
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    value = warp_reduce(value, combine);
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    value = lane < static_cast<int>(blockDim.x) / 32 ? partial[lane] : neutral;
    __syncthreads();  // `partial` may be written again
    return warp_reduce(value, combine);
}

struct Add {
    DEVICE float operator()(float a, float b) const { return a + b; }
};

DEVICE float warp_sum(float value) { return warp_reduce(value, Add()); }
DEVICE float block_sum(float value) { return block_reduce(value, 0.0f, Add()); }

// Softmax in one pass: the max so far, and the sum of exp(value - max). A finite start keeps rows of -Inf, and of no
// columns, finite.
struct Online {
    float max, sum;

    static DEVICE Online none() { return {-FLT_MAX, 0.0f}; }

    template <int N>
    DEVICE void add(const float (&values)[N]) {
        float highest = max;
#pragma unroll
        for (int i = 0; i < N; ++i) highest = fmaxf(highest, values[i]);
        sum *= __expf(max - highest);
#pragma unroll
        for (int i = 0; i < N; ++i) sum += __expf(values[i] - highest);
        max = highest;
    }
};

DEVICE Online shuffle_xor(Online value, int bits) {
    return {shuffle_xor(value.max, bits), shuffle_xor(value.sum, bits)};
}

struct MergeOnline {
    DEVICE Online operator()(Online a, Online b) const {
        const float max = fmaxf(a.max, b.max);
        return {max, a.sum * __expf(a.max - max) + b.sum * __expf(b.max - max)};
    }
};

// Launching

// NAME points to the block's dynamic shared memory, 16-byte aligned.
#ifdef __CUDACC__
#define DYNAMIC_SHARED(type, name)                       \
    extern __shared__ __align__(16) char name##_bytes[]; \
    type* name = reinterpret_cast<type*>(name##_bytes)
#else
#define DYNAMIC_SHARED(type, name) \
    type* name = reinterpret_cast<type*>((reinterpret_cast<uintptr_t>(host::dynamic_shared.data()) + 15) & ~uintptr_t{15})
#endif

// kernel<<<grid, block, shared_bytes, stream>>>(arguments…), on either side; nothing for an empty grid.
template <typename... P, typename... A>
int launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, void* stream, A... arguments) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
#ifdef __CUDACC__
    kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(static_cast<P>(arguments)...);
    return cudaGetLastError();
#else
    (void)stream;
    return host::run([=] { kernel(static_cast<P>(arguments)...); }, grid, block, shared_bytes);
#endif
}

// What every kernel shares: types, 16-byte loads and stores, reductions, and launching.
//
// A launcher is plain C: extern "C" int NAME(pointers…, int64_t sizes…, float…, int dtype, void* stream). It returns a
// cudaError_t. Arithmetic is float32; tensors are float32, float16 or bfloat16, by the codes of `DISPATCH`.

#pragma once

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

// Loads and stores of N neighbours, in accesses of at most 16 bytes, to which the address must be aligned.

template <typename T>
constexpr int PACK = 16 / sizeof(T);  // elements in 16 bytes

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
    T at[N];
};

// Copies of a Pack. Left to itself, nvcc splits some 16-byte stores into their elements.
template <typename P>
DEVICE void copy_to(void* to, const P& pack) {
#ifdef __CUDACC__
    if constexpr (sizeof(P) == 16) {
        uint4 word;
        memcpy(&word, &pack, 16);
        return __stwb(static_cast<uint4*>(to), word);
    }
#endif
    *static_cast<P*>(to) = pack;
}

// N elements as they are in memory; loaded long before they are needed, they take few registers.
template <typename T, int N>
struct Packs {
    static constexpr int M = N < PACK<T> ? N : PACK<T>;
    Pack<T, M> packs[N / M];

    DEVICE void load(const T* from) {
#pragma unroll
        for (int i = 0; i < N / M; ++i) packs[i] = *reinterpret_cast<const Pack<T, M>*>(from + i * M);
    }
    DEVICE void store(T* to) const {
#pragma unroll
        for (int i = 0; i < N / M; ++i) copy_to(to + i * M, packs[i]);
    }
    DEVICE void to_floats(float (&values)[N]) const {
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = to_float(packs[i / M].at[i % M]);
    }
    DEVICE void from_floats(const float (&values)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) from_float(values[i], packs[i / M].at[i % M]);
    }
};

template <int N, typename T>
DEVICE void load(const T* from, float (&values)[N]) {
    Packs<T, N> packs;
    packs.load(from);
    packs.to_floats(values);
}

template <int N, typename T>
DEVICE void store(T* to, const float (&values)[N]) {
    Packs<T, N> packs;
    packs.from_floats(values);
    packs.store(to);
}

// Whether rows of `columns` elements from `data` all begin at a multiple of 16 bytes.
template <typename T>
bool aligned(const void* data, int64_t columns = 0) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && columns % PACK<T> == 0;
}

// Reductions. `combine` takes two values to one; the order is fixed, so results repeat bitwise. Every thread gets the
// result. A type other than these needs its own `shuffle_xor`.

DEVICE float shuffle_xor(float value, int bits) { return __shfl_xor_sync(0xffffffffu, value, bits); }
DEVICE double shuffle_xor(double value, int bits) { return __shfl_xor_sync(0xffffffffu, value, bits); }

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
    template <typename V>
    DEVICE V operator()(V a, V b) const {
        return a + b;
    }
};

DEVICE float warp_sum(float value) { return warp_reduce(value, Add()); }
DEVICE float block_sum(float value) { return block_reduce(value, 0.0f, Add()); }

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

// Dropout: the elements to keep are a function of (seed, offset, index of the element in memory); see residual.py.

constexpr int DRAWS = 1 << 16;  // values that a draw of 16 bits may have

// Philox4x32-10 (Salmon et al. 2011): 128 bits from a counter of 128 and a key of 64.
DEVICE void philox(uint32_t (&counter)[4], uint32_t key0, uint32_t key1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t high0 = __umulhi(0xD2511F53u, counter[0]), low0 = 0xD2511F53u * counter[0];
        const uint32_t high1 = __umulhi(0xCD9E8D57u, counter[2]), low1 = 0xCD9E8D57u * counter[2];
        counter[0] = high1 ^ counter[1] ^ key0;
        counter[1] = low1;
        counter[2] = high0 ^ counter[3] ^ key1;
        counter[3] = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

struct Dropout {
    uint64_t seed = 0, offset = 0;
    uint32_t kept;  // of DRAWS; all: no dropout, and no seed is read
    float scale;

    DEVICE Dropout(const int64_t* seed_and_offset, int64_t kept)
        : kept(static_cast<uint32_t>(kept)), scale(DRAWS / static_cast<float>(kept)) {
        if (kept == DRAWS) return;
        seed = seed_and_offset[0];
        offset = seed_and_offset[1];
    }

    // Applies dropout to the elements from `index` on: to 8, where index is a multiple of 8, or to 1.
    template <int N>
    DEVICE void apply(float (&values)[N], int64_t index) const {
        static_assert(N == 8 || N == 1);
        if (kept == DRAWS) return;
        const uint64_t group = static_cast<uint64_t>(index) / 8;
        uint32_t words[4] = {static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32),
                             static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)};
        philox(words, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
        if constexpr (N == 8) {
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = keep(words[i / 2] >> i % 2 * 16, values[i]);
        } else {
            const int i = static_cast<int>(index % 8);
            const uint32_t low = i / 2 % 2 ? words[1] : words[0], high = i / 2 % 2 ? words[3] : words[2];
            values[0] = keep((i < 4 ? low : high) >> i % 2 * 16, values[0]);
        }
    }

    DEVICE float keep(uint32_t draw, float value) const { return (draw & 0xffffu) < kept ? value * scale : 0.0f; }
};

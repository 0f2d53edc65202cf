// Compiles the kernels for the CPU, so that their bodies can be tested without a GPU.
//
// Blocks run one after the other. Each thread of a block is a fiber with its own stack, and fibers take turns in a fixed
// order: one runs until it waits (__syncthreads, a warp shuffle) or returns. `kernels_order(1)` reverses the order, so
// that a test sees a missing barrier as a result that changes. A barrier that some thread never reaches ends the launch
// with cudaErrorLaunchFailure, as do threads that shuffle while others of their warp have returned.

#pragma once

#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <ucontext.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __shared__ static
#define __launch_bounds__(...)

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719;

inline const char* cudaGetErrorName(cudaError_t error) {
    return error == cudaSuccess             ? "cudaSuccess"
           : error == cudaErrorInvalidValue ? "cudaErrorInvalidValue"
                                            : "cudaErrorLaunchFailure";
}

inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace host {

struct Fiber {
    static constexpr size_t STACK = 128 << 10;
    std::unique_ptr<char[]> stack{new char[STACK]};
    jmp_buf at;
    bool started = false, done = false;
};

struct Barrier {
    int arrived = 0;
    unsigned generation = 0;
};

struct Warp {
    Barrier barrier;
    uint64_t value[warpSize];
};

inline std::vector<std::unique_ptr<Fiber>> fibers;  // kept between launches
inline std::vector<Warp> warps;
inline std::vector<char> dynamic_shared;
inline Barrier block_barrier;
inline std::function<void()> body;
inline jmp_buf scheduler;
inline ucontext_t start;
inline Fiber* current = nullptr;
inline int lane = 0, warp = 0, threads = 0;
inline bool reversed = false, progress = false;
inline std::mutex one_launch;

// Lets the next fiber run. _setjmp and not swapcontext, which asks the kernel for the signal mask each time.
__attribute__((noinline)) inline void pause() {
    if (_setjmp(current->at) == 0) _longjmp(scheduler, 1);
}

inline void fiber_main() {
    for (;;) {  // one turn per block
        body();
        current->done = progress = true;
        pause();
    }
}

__attribute__((noinline)) inline void resume(Fiber& fiber) {
    current = &fiber;
    if (_setjmp(scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    getcontext(&start);
    start.uc_stack.ss_sp = fiber.stack.get();
    start.uc_stack.ss_size = Fiber::STACK;
    start.uc_link = nullptr;
    makecontext(&start, fiber_main, 0);
    setcontext(&start);
}

__attribute__((noinline)) inline void wait(Barrier& barrier, int count) {
    progress = true;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.generation;
        return;
    }
    for (unsigned mine = barrier.generation; barrier.generation == mine;) pause();
}

__attribute__((noinline)) inline void place(int index) {  // thread indices of a fiber
    lane = index % warpSize;
    warp = index / warpSize;
    threadIdx.x = index % blockDim.x;
    threadIdx.y = index / blockDim.x % blockDim.y;
    threadIdx.z = index / (blockDim.x * blockDim.y);
}

inline bool run_block() {
    for (int i = 0; i < threads; ++i) fibers[i]->done = false;
    for (bool running = true; running;) {
        running = progress = false;
        for (int i = 0; i < threads; ++i) {
            const int index = reversed ? threads - 1 - i : i;
            if (fibers[index]->done) continue;
            place(index);
            resume(*fibers[index]);
            running = running || !fibers[index]->done;
        }
        if (running && !progress) return false;  // every thread waits
    }
    return block_barrier.arrived == 0;
}

template <typename Body>
cudaError_t run(Body call, dim3 grid, dim3 block, size_t shared_bytes) {
    const std::lock_guard<std::mutex> lock(one_launch);
    gridDim = grid, blockDim = block;
    threads = static_cast<int>(block.x * block.y * block.z);
    if (threads == 0 || threads > 1024 || threads % warpSize != 0) return cudaErrorInvalidValue;
    while (fibers.size() < static_cast<size_t>(threads)) fibers.push_back(std::make_unique<Fiber>());
    warps.resize(threads / warpSize);
    dynamic_shared.assign(shared_bytes + 16, 0);
    body = call;
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                blockIdx = dim3(x, y, z);
                std::memset(dynamic_shared.data(), 0xff, dynamic_shared.size());  // NaN: nothing is there yet
                if (run_block()) continue;
                fibers.clear();  // they stand in the middle of a kernel
                warps.clear();
                block_barrier = Barrier();
                return cudaErrorLaunchFailure;
            }
    return cudaSuccess;
}

template <typename T>
T exchange(T value, int from) {  // what the lane `from` of this warp gives
    static_assert(sizeof(T) <= sizeof(uint64_t));
    Warp& mine = warps[warp];
    const int self = lane;
    std::memcpy(&mine.value[self], &value, sizeof(T));
    wait(mine.barrier, warpSize);
    std::memcpy(&value, &mine.value[from], sizeof(T));
    wait(mine.barrier, warpSize);
    return value;
}

}  // namespace host

inline void __syncthreads() { host::wait(host::block_barrier, host::threads); }
inline void __syncwarp(unsigned = ~0u) { host::wait(host::warps[host::warp].barrier, warpSize); }

template <typename T>
T __shfl_sync(unsigned, T value, int from) {
    return host::exchange(value, from % warpSize);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int bits) {
    return host::exchange(value, host::lane ^ bits);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned by) {
    const int from = host::lane + static_cast<int>(by);
    return host::exchange(value, from < warpSize ? from : host::lane);
}

template <typename T>
T atomicAdd(T* at, T value) {
    const T before = *at;
    *at = before + value;
    return before;
}

inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>((uint64_t{a} * b) >> 32); }

// The 16-bit types: storage, and conversions that round to nearest even.

struct __half {
    uint16_t bits;
};
struct __nv_bfloat16 {
    uint16_t bits;
};

inline float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t{x.bits} << 16); }
inline __nv_bfloat16 __float2bfloat16(float x) {
    const uint32_t bits = __float_as_uint(x);
    if (x != x) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline float __half2float(__half x) {
    const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, rest = x.bits & 0x7fffu;
    if (rest >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | rest << 13);              // Inf, NaN
    if (rest >= 0x0400) return __uint_as_float(sign | ((rest << 13) + (112u << 23)));        // 112: 127 - 15
    return __uint_as_float(sign | __float_as_uint(static_cast<float>(rest) * 0x1p-24f));     // subnormal
}
inline __half __float2half(float x) {
    const uint32_t bits = __float_as_uint(x), sign = bits >> 16 & 0x8000;
    const float size = fabsf(x);
    if (x != x) return {0x7fff};
    if (size >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
    if (size < 0x1p-14f) return {static_cast<uint16_t>(sign | static_cast<uint32_t>(nearbyintf(size * 0x1p24f)))};
    const uint32_t rest = __float_as_uint(size) - (112u << 23);
    return {static_cast<uint16_t>(sign | ((rest + 0xfff + (rest >> 13 & 1)) >> 13))};
}

// Kernels over (rows, columns) in tiles, and sums over rows in a fixed order, without atomics.
//
// A block is 32 x 8 threads. Each thread takes N neighbouring columns (8 where the addresses allow 16-byte accesses,
// else 1) of every 8 * gridDim.x-th row, so what belongs to columns is read once. A sum over rows has two stages: each
// block adds its rows up and writes one row of `partial` (blocks, columns) float32; `sum_partial` adds those.

#pragma once

#include "common.cuh"

constexpr int WIDE = 8;  // columns per thread
constexpr int TILE_WIDTH = 32, TILE_HEIGHT = 8, TILE_THREADS = TILE_WIDTH * TILE_HEIGHT;

// Whether all rows of all tensors begin at 16 bytes; a null pointer does.
template <typename... P>
bool wide(int64_t columns, const P*... data) {
    return columns % WIDE == 0 && ((reinterpret_cast<uintptr_t>(data) % 16 == 0) && ...);
}

inline unsigned blocks(int64_t count, int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

// The grid for `strips` blocks of rows.
inline dim3 tiles(int64_t strips, int64_t columns, int n) {
    return dim3(static_cast<unsigned>(strips), blocks(columns, TILE_WIDTH * n));
}

DEVICE int64_t tile_row() { return int64_t{blockIdx.x} * TILE_HEIGHT + threadIdx.y; }
DEVICE int64_t tile_step() { return int64_t{gridDim.x} * TILE_HEIGHT; }
template <int N>
DEVICE int64_t tile_column() {
    return (int64_t{blockIdx.y} * TILE_WIDTH + threadIdx.x) * N;
}

// Adds the sums of the block's eight rows of threads and writes them into its row of `partial`. All threads call it.
template <int N>
DEVICE void write_partial(const float (&sums)[N], float* partial, int64_t columns) {
    __shared__ float all[TILE_HEIGHT][TILE_WIDTH * N];
#pragma unroll
    for (int i = 0; i < N; ++i) all[threadIdx.y][threadIdx.x * N + i] = sums[i];
    __syncthreads();
    const int mine = threadIdx.y * TILE_WIDTH + threadIdx.x;
    const int64_t column = int64_t{blockIdx.y} * TILE_WIDTH * N + mine;
    if (mine >= TILE_WIDTH * N || column >= columns) return;
    float sum = 0.0f;
#pragma unroll
    for (int y = 0; y < TILE_HEIGHT; ++y) sum += all[y][mine];
    partial[blockIdx.x * columns + column] = sum;
}

// partial (count, width) float32 -> one or two outputs (columns,) of type T, from one row's `columns` numbers each.
template <typename T>
__global__ void __launch_bounds__(1024)
    sum_partial(const float* __restrict__ partial, T* first, T* second, int64_t count, int64_t width,
                int64_t columns) {
    __shared__ float all[32][32];
    const int64_t column = int64_t{blockIdx.x} * 32 + threadIdx.x;
    const float* from = partial + blockIdx.y * columns + column;
    float sum = 0.0f;
    if (column < columns)
        for (int64_t i = threadIdx.y; i < count; i += 32) sum += from[i * width];
    all[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= columns) return;
    for (int y = 1; y < 32; ++y) sum += all[y][threadIdx.x];
    from_float(sum, (blockIdx.y == 0 ? first : second)[column]);
}

template <typename T>
int launch_sum_partial(const void* partial, void* first, void* second, int64_t count, int64_t width, int64_t columns,
                       void* stream) {
    const int outputs = second == nullptr ? 1 : 2;
    return launch(sum_partial<T>, dim3(blocks(columns, 32), outputs), dim3(32, 32), 0, stream,
                  static_cast<const float*>(partial), static_cast<T*>(first), static_cast<T*>(second),
                  count, width, columns);
}

// Softmax of attention scores with a causal mask; see softmax.py.
//
// scores is (rows, columns), where rows are those of many (length, columns) matrices one after the other. One warp takes
// one row: it reads the unmasked columns twice (the second time from cache) and writes all of them once.

#include "common.cuh"

namespace {

constexpr int WARPS = 4;  // per block

// The row of this warp, and how many of its columns are not masked.
DEVICE int64_t row_of_warp() { return int64_t{blockIdx.x} * WARPS + threadIdx.x / 32; }
DEVICE int64_t unmasked(int64_t row, int64_t length, int64_t columns) { return row % length + 1 + columns - length; }

template <typename T, int N>
__global__ void __launch_bounds__(WARPS * 32)
    softmax(const T* __restrict__ scores, T* __restrict__ out, int64_t rows, int64_t length, int64_t columns, float scale) {
    const int64_t row = row_of_warp();
    const int lane = threadIdx.x % 32;
    if (row >= rows) return;
    scores += row * columns;
    out += row * columns;
    const int64_t valid = unmasked(row, length, columns);

    Online found = Online::none();
    for (int64_t j = lane * N; j < valid; j += 32 * N) {
        float values[N];
        load<N>(scores + j, values);
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = j + i < valid ? values[i] * scale : -INFINITY;
        found.add(values);
    }
    found = warp_reduce(found, MergeOnline());

    const float factor = 1.0f / found.sum;
    for (int64_t j = lane * N; j < columns; j += 32 * N) {
        float values[N] = {};
        if (j < valid) {
            load<N>(scores + j, values);
#pragma unroll
            for (int i = 0; i < N; ++i)
                values[i] = j + i < valid ? __expf(values[i] * scale - found.max) * factor : 0.0f;
        }
        store<N>(out + j, values);
    }
}

// `out` may be `gradient`.
template <typename T, int N>
__global__ void __launch_bounds__(WARPS * 32)
    softmax_gradient(const T* __restrict__ probabilities, const T* gradient, T* out, int64_t rows, int64_t length,
             int64_t columns, float scale) {
    const int64_t row = row_of_warp();
    const int lane = threadIdx.x % 32;
    if (row >= rows) return;
    probabilities += row * columns;
    gradient += row * columns;
    out += row * columns;
    const int64_t valid = unmasked(row, length, columns);

    float dot = 0.0f;
    for (int64_t j = lane * N; j < valid; j += 32 * N) {
        float p[N], g[N];
        load<N>(probabilities + j, p);
        load<N>(gradient + j, g);
#pragma unroll
        for (int i = 0; i < N; ++i) dot += j + i < valid ? p[i] * g[i] : 0.0f;
    }
    dot = warp_sum(dot);

    for (int64_t j = lane * N; j < columns; j += 32 * N) {
        float g[N] = {};
        if (j < valid) {
            float p[N];
            load<N>(probabilities + j, p);
            load<N>(gradient + j, g);
#pragma unroll
            for (int i = 0; i < N; ++i) g[i] = j + i < valid ? p[i] * (g[i] - dot) * scale : 0.0f;
        }
        store<N>(out + j, g);
    }
}

dim3 blocks(int64_t rows) { return dim3((rows + WARPS - 1) / WARPS); }

}  // namespace

extern "C" int causal_softmax_forward(const void* scores, void* out, int64_t rows, int64_t length, int64_t columns,
                                      float scale, int dtype, void* stream) {
    if (length > columns) return cudaErrorInvalidValue;
    DISPATCH(dtype, {
        const bool wide = aligned<T>(scores, columns) && aligned<T>(out);
        return launch(wide ? softmax<T, PACK<T>> : softmax<T, 1>, blocks(rows), WARPS * 32, 0, stream,
                      static_cast<const T*>(scores), static_cast<T*>(out), rows, length, columns, scale);
    });
}

extern "C" int causal_softmax_backward(const void* probabilities, const void* gradient, void* out, int64_t rows,
                                       int64_t length, int64_t columns, float scale, int dtype, void* stream) {
    if (length > columns) return cudaErrorInvalidValue;
    DISPATCH(dtype, {
        const bool wide = aligned<T>(probabilities, columns) && aligned<T>(gradient) && aligned<T>(out);
        return launch(wide ? softmax_gradient<T, PACK<T>> : softmax_gradient<T, 1>, blocks(rows), WARPS * 32, 0, stream,
                      static_cast<const T*>(probabilities), static_cast<const T*>(gradient), static_cast<T*>(out), rows,
                      length, columns, scale);
    });
}

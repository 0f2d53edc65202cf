// x + dropout(branch + bias), and its gradients; see residual.py.
//
// All are (rows, columns). x, the sum and the bias are of type S, the branch of type B.

#include "columns.cuh"

constexpr int FORWARD_ROWS = 4;  // rows per thread

template <typename S, typename B, int N>
__global__ void __launch_bounds__(TILE_THREADS)
    add_forward(const S* __restrict__ x, const B* __restrict__ branch, const S* __restrict__ bias,
                const int64_t* __restrict__ seed, S* __restrict__ sum, int64_t rows, int64_t columns, int64_t kept) {
    const int64_t column = tile_column<N>();
    if (column >= columns) return;
    const Dropout dropout(seed, kept);
    float shift[N] = {};
    if (bias != nullptr) load<N>(bias + column, shift);
    for (int64_t row = tile_row(); row < rows; row += tile_step()) {
        const int64_t index = row * columns + column;
        float values[N], added[N];
        load<N>(x + index, values);
        load<N>(branch + index, added);
#pragma unroll
        for (int i = 0; i < N; ++i) added[i] += shift[i];
        dropout.apply<N>(added, index);
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] += added[i];
        store<N>(sum + index, values);
    }
}

// d_branch and partial may be null: not needed.
template <typename S, typename B, int N>
__global__ void __launch_bounds__(TILE_THREADS)
    add_backward(const S* __restrict__ gradient, const int64_t* __restrict__ seed, B* __restrict__ d_branch,
                 float* __restrict__ partial, int64_t rows, int64_t columns, int64_t kept) {
    const int64_t column = tile_column<N>();
    const Dropout dropout(seed, kept);
    float sums[N] = {};
    if (column < columns) {
        for (int64_t row = tile_row(); row < rows; row += tile_step()) {
            const int64_t index = row * columns + column;
            float values[N];
            load<N>(gradient + index, values);
            dropout.apply<N>(values, index);
            if (d_branch != nullptr) store<N>(d_branch + index, values);
#pragma unroll
            for (int i = 0; i < N; ++i) sums[i] += values[i];
        }
    }
    if (partial != nullptr) write_partial<N>(sums, partial, columns);
}

extern "C" int add_dropout(const void* x, const void* branch, const void* bias, const void* seed, void* sum,
                           int64_t rows, int64_t columns, int64_t kept, int dtype, int branch_dtype, void* stream) {
    DISPATCH_PAIR(dtype, branch_dtype, {
        const bool fast = wide(columns, x, branch, bias, sum);
        const auto kernel = fast ? add_forward<S, B, WIDE> : add_forward<S, B, 1>;
        const dim3 grid = tiles(blocks(rows, TILE_HEIGHT * FORWARD_ROWS), columns, fast ? WIDE : 1);
        return launch(kernel, grid, dim3(TILE_WIDTH, TILE_HEIGHT), 0, stream, static_cast<const S*>(x),
                      static_cast<const B*>(branch), static_cast<const S*>(bias), static_cast<const int64_t*>(seed),
                      static_cast<S*>(sum), rows, columns, kept);
    })
}

// d_branch may be null, and d_bias with partial.
extern "C" int add_dropout_backward(const void* gradient, const void* seed, void* d_branch, void* d_bias, void* partial,
                                    int64_t rows, int64_t columns, int64_t strips, int64_t kept, int dtype,
                                    int branch_dtype, void* stream) {
    DISPATCH_PAIR(dtype, branch_dtype, {
        const bool fast = wide(columns, gradient, d_branch);
        const auto kernel = fast ? add_backward<S, B, WIDE> : add_backward<S, B, 1>;
        const int error = launch(kernel, tiles(strips, columns, fast ? WIDE : 1), dim3(TILE_WIDTH, TILE_HEIGHT), 0,
                                 stream, static_cast<const S*>(gradient), static_cast<const int64_t*>(seed),
                                 static_cast<B*>(d_branch), static_cast<float*>(partial), rows, columns, kept);
        if (error != cudaSuccess || d_bias == nullptr) return error;
        return launch_sum_partial<S>(partial, d_bias, nullptr, nullptr, strips, columns, columns, stream);
    })
}

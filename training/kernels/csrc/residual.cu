// x + dropout(branch), and the gradient of branch; see residual.py. All are (rows, columns).

#include "columns.cuh"

constexpr int ROWS = 4;  // rows per thread

template <typename T, int N>
__global__ void __launch_bounds__(TILE_THREADS)
    add_forward(const T* __restrict__ x, const T* __restrict__ branch, const int64_t* __restrict__ seed,
                T* __restrict__ sum, int64_t rows, int64_t columns, int64_t kept) {
    const int64_t column = tile_column<N>();
    if (column >= columns) return;
    const Dropout dropout(seed, kept);
    for (int64_t row = tile_row(); row < rows; row += tile_step()) {
        const int64_t index = row * columns + column;
        float values[N], added[N];
        load<N>(x + index, values);
        load<N>(branch + index, added);
        dropout.apply<N>(added, index);
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] += added[i];
        store<N>(sum + index, values);
    }
}

template <typename T, int N>
__global__ void __launch_bounds__(TILE_THREADS)
    add_backward(const T* __restrict__ gradient, const int64_t* __restrict__ seed, T* __restrict__ d_branch,
                 int64_t rows, int64_t columns, int64_t kept) {
    const int64_t column = tile_column<N>();
    if (column >= columns) return;
    const Dropout dropout(seed, kept);
    for (int64_t row = tile_row(); row < rows; row += tile_step()) {
        const int64_t index = row * columns + column;
        float values[N];
        load<N>(gradient + index, values);
        dropout.apply<N>(values, index);
        store<N>(d_branch + index, values);
    }
}

extern "C" int add_dropout(const void* x, const void* branch, const void* seed, void* sum, int64_t rows,
                           int64_t columns, int64_t kept, int dtype, void* stream) {
    DISPATCH(dtype, {
        const bool fast = wide(columns, x, branch, sum);
        const auto kernel = fast ? add_forward<T, WIDE> : add_forward<T, 1>;
        const dim3 grid = tiles(blocks(rows, TILE_HEIGHT * ROWS), columns, fast ? WIDE : 1);
        return launch(kernel, grid, dim3(TILE_WIDTH, TILE_HEIGHT), 0, stream, static_cast<const T*>(x),
                      static_cast<const T*>(branch), static_cast<const int64_t*>(seed), static_cast<T*>(sum), rows,
                      columns, kept);
    })
}

extern "C" int add_dropout_backward(const void* gradient, const void* seed, void* d_branch, int64_t rows,
                                    int64_t columns, int64_t kept, int dtype, void* stream) {
    DISPATCH(dtype, {
        const bool fast = wide(columns, gradient, d_branch);
        const auto kernel = fast ? add_backward<T, WIDE> : add_backward<T, 1>;
        const dim3 grid = tiles(blocks(rows, TILE_HEIGHT * ROWS), columns, fast ? WIDE : 1);
        return launch(kernel, grid, dim3(TILE_WIDTH, TILE_HEIGHT), 0, stream, static_cast<const T*>(gradient),
                      static_cast<const int64_t*>(seed), static_cast<T*>(d_branch), rows, columns, kept);
    })
}

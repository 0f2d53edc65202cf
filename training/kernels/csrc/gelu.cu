// gelu(x + bias) in its tanh form, and its gradients; see gelu.py. x is (rows, columns), bias (columns,).

#include "columns.cuh"

constexpr int FORWARD_ROWS = 4;  // rows per thread

// tanh(u) = 2 sigmoid(2u) - 1, so gelu(v) = v sigmoid(2u) with u = sqrt(2 / pi) (v + 0.044715 v^3).
constexpr float SLOPE = 1.5957691216057308f;   // 2 sqrt(2 / pi)
constexpr float CUBIC = 0.0713548162726009f;   // 2 sqrt(2 / pi) 0.044715

DEVICE float sigmoid_of_2u(float v) { return __fdividef(1.0f, 1.0f + __expf(-v * (SLOPE + CUBIC * v * v))); }

template <typename T, int N>
__global__ void __launch_bounds__(TILE_THREADS)
    gelu_forward(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ out, int64_t rows,
                 int64_t columns) {
    const int64_t column = tile_column<N>();
    if (column >= columns) return;
    float shift[N];
    load<N>(bias + column, shift);
    for (int64_t row = tile_row(); row < rows; row += tile_step()) {
        float values[N];
        load<N>(x + row * columns + column, values);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float v = values[i] + shift[i];
            values[i] = v * sigmoid_of_2u(v);
        }
        store<N>(out + row * columns + column, values);
    }
}

template <typename T, int N>
__global__ void __launch_bounds__(TILE_THREADS)
    gelu_backward(const T* __restrict__ gradient, const T* __restrict__ x, const T* __restrict__ bias,
                  T* __restrict__ d_x, float* __restrict__ partial, int64_t rows, int64_t columns) {
    const int64_t column = tile_column<N>();
    float sums[N] = {};
    if (column < columns) {
        float shift[N];
        load<N>(bias + column, shift);
        for (int64_t row = tile_row(); row < rows; row += tile_step()) {
            float values[N], out[N];
            load<N>(x + row * columns + column, values);
            load<N>(gradient + row * columns + column, out);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float v = values[i] + shift[i], s = sigmoid_of_2u(v);
                out[i] *= s + v * s * (1.0f - s) * (SLOPE + 3.0f * CUBIC * v * v);
                sums[i] += out[i];
            }
            store<N>(d_x + row * columns + column, out);
        }
    }
    write_partial<N>(sums, partial, columns);
}

extern "C" int bias_gelu(const void* x, const void* bias, void* out, int64_t rows, int64_t columns, int dtype,
                         void* stream) {
    DISPATCH(dtype, {
        const bool fast = wide(columns, x, bias, out);
        const auto kernel = fast ? gelu_forward<T, WIDE> : gelu_forward<T, 1>;
        const dim3 grid = tiles(blocks(rows, TILE_HEIGHT * FORWARD_ROWS), columns, fast ? WIDE : 1);
        return launch(kernel, grid, dim3(TILE_WIDTH, TILE_HEIGHT), 0, stream, static_cast<const T*>(x),
                      static_cast<const T*>(bias), static_cast<T*>(out), rows, columns);
    })
}

extern "C" int bias_gelu_backward(const void* gradient, const void* x, const void* bias, void* d_x, void* d_bias,
                                  void* partial, int64_t rows, int64_t columns, int64_t strips, int dtype,
                                  void* stream) {
    DISPATCH(dtype, {
        const bool fast = wide(columns, gradient, x, bias, d_x);
        const auto kernel = fast ? gelu_backward<T, WIDE> : gelu_backward<T, 1>;
        const int error = launch(kernel, tiles(strips, columns, fast ? WIDE : 1), dim3(TILE_WIDTH, TILE_HEIGHT), 0,
                                 stream, static_cast<const T*>(gradient), static_cast<const T*>(x),
                                 static_cast<const T*>(bias), static_cast<T*>(d_x), static_cast<float*>(partial), rows,
                                 columns);
        if (error != cudaSuccess) return error;
        return launch_sum_partial<T>(partial, d_bias, nullptr, strips, columns, columns, stream);
    })
}

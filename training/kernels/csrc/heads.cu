// The gradients of q, k and v put together, and the bias's: see heads.py. Sources are (rows, heads, size), the result is
// (rows, heads, 3, size): `columns` = heads * 3 * size.

#include "columns.cuh"

template <typename T, int N>
__global__ void __launch_bounds__(TILE_THREADS)
    pack(const T* __restrict__ d_q, const T* __restrict__ d_k, const T* __restrict__ d_v, T* __restrict__ out,
         float* __restrict__ partial, int64_t rows, int64_t columns, int64_t size) {
    const int64_t column = tile_column<N>();
    float sums[N] = {};
    if (column < columns) {
        const int64_t head = column / (3 * size), part = column % (3 * size) / size, width = columns / 3;
        const T* from = (part == 0 ? d_q : part == 1 ? d_k : d_v) + head * size + column % size;
        for (int64_t row = tile_row(); row < rows; row += tile_step()) {
            Packs<T, N> packs;
            packs.load(from + row * width);
            packs.store(out + row * columns + column);
            float values[N];
            packs.to_floats(values);
#pragma unroll
            for (int i = 0; i < N; ++i) sums[i] += values[i];
        }
    }
    write_partial<N>(sums, partial, columns);
}

extern "C" int pack_heads(const void* d_q, const void* d_k, const void* d_v, void* out, void* d_bias, void* partial,
                          int64_t rows, int64_t columns, int64_t size, int64_t strips, int dtype, void* stream) {
    DISPATCH(dtype, {
        const bool fast = size % WIDE == 0 && wide(columns, d_q, d_k, d_v, out);
        const auto kernel = fast ? pack<T, WIDE> : pack<T, 1>;
        const int error = launch(kernel, tiles(strips, columns, fast ? WIDE : 1), dim3(TILE_WIDTH, TILE_HEIGHT), 0,
                                 stream, static_cast<const T*>(d_q), static_cast<const T*>(d_k),
                                 static_cast<const T*>(d_v), static_cast<T*>(out), static_cast<float*>(partial), rows,
                                 columns, size);
        if (error != cudaSuccess) return error;
        return launch_sum_partial<T>(partial, d_bias, nullptr, strips, columns, columns, stream);
    })
}

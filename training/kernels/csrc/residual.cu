// x + dropout(branch) with the LayerNorm that follows, and the gradients; see residual.py. All are (rows, columns).

#include "columns.cuh"

constexpr int NORM_THREADS = 512;  // of a block, which takes one row at a time, at most
constexpr int NORM_BLOCKS = 1056;  // of the forward pass: eight for each of an H100's 132 SMs

template <typename T, int N>
DEVICE void round_to(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        T rounded;
        from_float(values[i], rounded);
        values[i] = to_float(rounded);
    }
}

// One block takes one row at a time, and each thread 8 of its columns, which stay in registers. Two blocks per SM, so
// at most 64 registers: left to itself, ptxas aims at three on sm_100 and spills.
template <typename T>
__global__ void __launch_bounds__(NORM_THREADS, 2)
    norm_forward(const T* __restrict__ x, const T* __restrict__ branch, const int64_t* __restrict__ seed,
                 const T* __restrict__ weight, const T* __restrict__ norm_bias,
                 T* __restrict__ sum, T* __restrict__ normed, float* __restrict__ mean, float* __restrict__ rstd,
                 int64_t rows, int64_t columns, int64_t kept, float eps) {
    const Dropout dropout(seed, kept);
    const int64_t column = int64_t{threadIdx.x} * WIDE;
    const bool mine = column < columns;
    const float share = 1.0f / static_cast<float>(columns);
    float scale[WIDE], norm_shift[WIDE];
    if (mine) {
        load<WIDE>(weight + column, scale);
        load<WIDE>(norm_bias + column, norm_shift);
    }
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const int64_t index = row * columns + column;
        float values[WIDE] = {}, local = 0.0f;
        if (mine) {
            float added[WIDE];
            load<WIDE>(x + index, values);
            load<WIDE>(branch + index, added);
            dropout.apply<WIDE>(added, index);
#pragma unroll
            for (int i = 0; i < WIDE; ++i) values[i] += added[i];
            store<WIDE>(sum + index, values);
            round_to<T>(values);  // the norm is that of the sum as it is returned
#pragma unroll
            for (int i = 0; i < WIDE; ++i) local += values[i];
        }
        const float middle = block_sum(local) * share;
        local = 0.0f;
        if (mine) {
#pragma unroll
            for (int i = 0; i < WIDE; ++i) {
                values[i] -= middle;
                local += values[i] * values[i];
            }
        }
        const float inverse = 1.0f / sqrtf(block_sum(local) * share + eps);
        if (mine) {
#pragma unroll
            for (int i = 0; i < WIDE; ++i) values[i] = values[i] * inverse * scale[i] + norm_shift[i];
            store<WIDE>(normed + index, values);
        }
        if (threadIdx.x == 0) {
            mean[row] = middle;
            rstd[row] = inverse;
        }
    }
}

// The same for any number of columns and any alignment: a thread's columns are read again from memory.
template <typename T>
__global__ void __launch_bounds__(NORM_THREADS)
    norm_forward_any(const T* __restrict__ x, const T* __restrict__ branch, const int64_t* __restrict__ seed,
                     const T* __restrict__ weight, const T* __restrict__ norm_bias,
                     T* sum, T* __restrict__ normed, float* __restrict__ mean, float* __restrict__ rstd, int64_t rows,
                     int64_t columns, int64_t kept, float eps) {
    const Dropout dropout(seed, kept);
    const float share = 1.0f / static_cast<float>(columns);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const int64_t start = row * columns;
        float local = 0.0f;
        for (int64_t column = threadIdx.x; column < columns; column += blockDim.x) {
            float value[1] = {to_float(branch[start + column])};
            dropout.apply<1>(value, start + column);
            value[0] += to_float(x[start + column]);
            round_to<T>(value);
            store<1>(sum + start + column, value);
            local += value[0];
        }
        const float middle = block_sum(local) * share;
        local = 0.0f;
        for (int64_t column = threadIdx.x; column < columns; column += blockDim.x) {
            const float value = to_float(sum[start + column]) - middle;
            local += value * value;
        }
        const float inverse = 1.0f / sqrtf(block_sum(local) * share + eps);
        for (int64_t column = threadIdx.x; column < columns; column += blockDim.x) {
            const float value = (to_float(sum[start + column]) - middle) * inverse;
            from_float(value * to_float(weight[column]) + to_float(norm_bias[column]), normed[start + column]);
        }
        if (threadIdx.x == 0) {
            mean[row] = middle;
            rstd[row] = inverse;
        }
    }
}

struct Pair {
    float a, b;
};

DEVICE Pair shuffle_xor(Pair value, int bits) { return {shuffle_xor(value.a, bits), shuffle_xor(value.b, bits)}; }

struct AddPairs {
    DEVICE Pair operator()(Pair x, Pair y) const { return {x.a + y.a, x.b + y.b}; }
};

DEVICE Pair block_sums(float a, float b) { return block_reduce(Pair{a, b}, Pair{0.0f, 0.0f}, AddPairs()); }

// With g = normed gradient * weight and h = (sum - mean) * rstd, the sum's gradient is
//     sum_gradient + rstd * (g - mean of g - h * mean of g h).
// A block's row of `partial` (gridDim.x, 2, columns) has its rows' sums for weight and norm_bias. sum_gradient
// may be null: zero. d_branch may be null: it is d_x. The next row is fetched before this one is reduced: a block waits
// at barriers and few blocks fit, so that the memory would have too little to do.
template <typename T>
__global__ void __launch_bounds__(NORM_THREADS)
    norm_backward(const T* __restrict__ sum_gradient, const T* __restrict__ normed_gradient, const T* __restrict__ sum,
                  const float* __restrict__ mean, const float* __restrict__ rstd, const int64_t* __restrict__ seed,
                  const T* __restrict__ weight, T* __restrict__ d_x, T* __restrict__ d_branch,
                  float* __restrict__ partial, int64_t rows, int64_t columns, int64_t kept) {
    const Dropout dropout(seed, kept);
    const int64_t column = int64_t{threadIdx.x} * WIDE;
    const bool mine = column < columns;
    const float share = 1.0f / static_cast<float>(columns);
    float scale[WIDE], d_weight[WIDE] = {}, d_norm_bias[WIDE] = {};
    if (mine) load<WIDE>(weight + column, scale);
    Packs<T, WIDE> next_sum, next_out = {};
    Packs<T, WIDE> next_g;
    float next_mean = 0.0f, next_rstd = 0.0f;
    const auto fetch = [&](int64_t row) {
        if (!mine || row >= rows) return;
        const int64_t index = row * columns + column;
        next_g.load(normed_gradient + index);
        next_sum.load(sum + index);
        if (sum_gradient != nullptr) next_out.load(sum_gradient + index);
        next_mean = mean[row];
        next_rstd = rstd[row];
    };
    fetch(blockIdx.x);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        float g[WIDE], h[WIDE], out[WIDE], local = 0.0f, local_h = 0.0f;
        const float inverse = next_rstd;
        if (mine) {
            next_g.to_floats(g);
            next_sum.to_floats(h);
            next_out.to_floats(out);
#pragma unroll
            for (int i = 0; i < WIDE; ++i) {
                h[i] = (h[i] - next_mean) * inverse;
                d_weight[i] += g[i] * h[i];
                d_norm_bias[i] += g[i];
                g[i] *= scale[i];
                local += g[i];
                local_h += g[i] * h[i];
            }
        }
        fetch(row + gridDim.x);
        const Pair total = block_sums(local, local_h);
        if (mine) {
            const int64_t index = row * columns + column;
#pragma unroll
            for (int i = 0; i < WIDE; ++i) out[i] += inverse * (g[i] - total.a * share - h[i] * (total.b * share));
            store<WIDE>(d_x + index, out);
            dropout.apply<WIDE>(out, index);
            if (d_branch != nullptr) store<WIDE>(d_branch + index, out);
        }
    }
    if (!mine) return;
    float* totals = partial + blockIdx.x * 2 * columns + column;
    store<WIDE>(totals, d_weight);
    store<WIDE>(totals + columns, d_norm_bias);
}

// The same for any number of columns and any alignment; the block's row of `partial` holds the sums so far.
template <typename T>
__global__ void __launch_bounds__(NORM_THREADS)
    norm_backward_any(const T* __restrict__ sum_gradient, const T* __restrict__ normed_gradient,
                      const T* __restrict__ sum, const float* __restrict__ mean, const float* __restrict__ rstd,
                      const int64_t* __restrict__ seed, const T* __restrict__ weight, T* __restrict__ d_x,
                      T* __restrict__ d_branch, float* partial, int64_t rows, int64_t columns, int64_t kept) {
    const Dropout dropout(seed, kept);
    const float share = 1.0f / static_cast<float>(columns);
    float* d_weight = partial + blockIdx.x * 2 * columns;
    float* d_norm_bias = d_weight + columns;
    for (int64_t column = threadIdx.x; column < columns; column += blockDim.x)
        d_weight[column] = d_norm_bias[column] = 0.0f;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const int64_t start = row * columns;
        const float middle = mean[row], inverse = rstd[row];
        float local = 0.0f, local_h = 0.0f;
#pragma unroll 1  // unrolled, both loops spill registers on sm_100 and sm_120
        for (int64_t column = threadIdx.x; column < columns; column += blockDim.x) {
            const float gradient = to_float(normed_gradient[start + column]);
            const float h = (to_float(sum[start + column]) - middle) * inverse;
            const float g = gradient * to_float(weight[column]);
            d_weight[column] += gradient * h;
            d_norm_bias[column] += gradient;
            local += g;
            local_h += g * h;
        }
        const Pair total = block_sums(local, local_h);
#pragma unroll 1
        for (int64_t column = threadIdx.x; column < columns; column += blockDim.x) {
            const float g = to_float(normed_gradient[start + column]) * to_float(weight[column]);
            const float h = (to_float(sum[start + column]) - middle) * inverse;
            float value[1] = {inverse * (g - total.a * share - h * (total.b * share))};
            if (sum_gradient != nullptr) value[0] += to_float(sum_gradient[start + column]);
            store<1>(d_x + start + column, value);
            dropout.apply<1>(value, start + column);
            if (d_branch != nullptr) store<1>(d_branch + start + column, value);
        }
    }
}

// Whether a thread of a block can hold its columns of a row.
template <typename... P>
bool in_registers(int64_t columns, const P*... data) {
    return columns <= NORM_THREADS * WIDE && wide(columns, data...);
}

inline unsigned row_threads(int64_t columns) { return blocks(columns, WIDE * 32) * 32; }

extern "C" int add_dropout_norm(const void* x, const void* branch, const void* seed, const void* weight, const void* norm_bias, void* sum, void* normed, void* mean,
                                void* rstd, int64_t rows, int64_t columns, int64_t kept, float eps, int dtype,
                                void* stream) {
    DISPATCH(dtype, {
        const bool fast = in_registers(columns, x, branch, weight, norm_bias, sum, normed);
        return launch(fast ? norm_forward<T> : norm_forward_any<T>,
                      static_cast<unsigned>(rows < NORM_BLOCKS ? rows : NORM_BLOCKS),
                      fast ? row_threads(columns) : NORM_THREADS, 0, stream, static_cast<const T*>(x),
                      static_cast<const T*>(branch), static_cast<const int64_t*>(seed),
                      static_cast<const T*>(weight), static_cast<const T*>(norm_bias), static_cast<T*>(sum),
                      static_cast<T*>(normed), static_cast<float*>(mean), static_cast<float*>(rstd), rows, columns,
                      kept, eps);
    })
}

// sum_gradient and d_branch may be null.
extern "C" int add_dropout_norm_backward(const void* sum_gradient, const void* normed_gradient, const void* sum,
                                         const void* mean, const void* rstd, const void* seed, const void* weight,
                                         void* d_x, void* d_branch, void* d_weight, void* d_norm_bias, void* partial, int64_t rows, int64_t columns, int64_t blocks, int64_t kept,
                                         int dtype, void* stream) {
    DISPATCH(dtype, {
        const bool fast = in_registers(columns, sum_gradient, normed_gradient, sum, weight, d_x, d_branch);
        const int error = launch(fast ? norm_backward<T> : norm_backward_any<T>, static_cast<unsigned>(blocks),
                                 fast ? row_threads(columns) : NORM_THREADS, 0, stream,
                                 static_cast<const T*>(sum_gradient), static_cast<const T*>(normed_gradient),
                                 static_cast<const T*>(sum), static_cast<const float*>(mean),
                                 static_cast<const float*>(rstd), static_cast<const int64_t*>(seed),
                                 static_cast<const T*>(weight), static_cast<T*>(d_x), static_cast<T*>(d_branch),
                                 static_cast<float*>(partial), rows, columns, kept);
        if (error != cudaSuccess) return error;
        return launch_sum_partial<T>(partial, d_weight, d_norm_bias, blocks, 2 * columns, columns, stream);
    })
}

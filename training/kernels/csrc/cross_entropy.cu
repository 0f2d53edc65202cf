// Cross-entropy over a vocabulary of which this process has `rows` rows, `first` and up; see cross_entropy.py.
//
// logits is (N, columns): column j is the vocabulary row first + j, and columns from `rows` on are padding. One block
// takes one row of logits. The statistics read it once, the backward reads and writes it once.

#include "common.cuh"

namespace {

constexpr int THREADS = 512;

template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
    logit_statistics(const T* __restrict__ logits, const int64_t* __restrict__ targets, float* __restrict__ out,
               int64_t columns, int64_t first, int64_t rows) {
    const T* row = logits + blockIdx.x * columns;
    Online found = Online::none();
    const int64_t whole = rows / N * N;
    for (int64_t j = int64_t{threadIdx.x} * N; j < whole; j += THREADS * N) {
        float values[N];
        load<N>(row + j, values);
        found.add(values);
    }
    if (whole + threadIdx.x < rows) {  // fewer than N are left
        const float values[1] = {to_float(row[whole + threadIdx.x])};
        found.add(values);
    }
    found = block_reduce(found, Online::none(), MergeOnline());
    if (threadIdx.x != 0) return;
    const int64_t target = targets[blockIdx.x] - first;
    float* result = out + int64_t{blockIdx.x} * 3;
    result[0] = found.max;
    result[1] = found.sum;
    result[2] = target >= 0 && target < rows ? to_float(row[target]) : 0.0f;
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
    logit_gradient(T* __restrict__ logits, const int64_t* __restrict__ targets, const float* __restrict__ log_sum_exp,
             const float* __restrict__ gradient, int64_t columns, int64_t first, int64_t rows, int64_t ignored) {
    T* row = logits + blockIdx.x * columns;
    const int64_t label = targets[blockIdx.x], target = label - first;
    const bool counts = label != ignored;
    const float shift = log_sum_exp[blockIdx.x], scale = gradient[blockIdx.x];
    for (int64_t j = int64_t{threadIdx.x} * N; j < columns; j += THREADS * N) {  // columns is a multiple of N
        float values[N];
        load<N>(row + j, values);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float one = j + i == target ? 1.0f : 0.0f;
            values[i] = counts && j + i < rows ? (__expf(values[i] - shift) - one) * scale : 0.0f;
        }
        store<N>(row + j, values);
    }
}

}  // namespace

extern "C" int cross_entropy_statistics(const void* logits, const void* targets, void* out, int64_t count,
                                        int64_t columns, int64_t first, int64_t rows, int dtype, void* stream) {
    if (rows < 0 || rows > columns) return cudaErrorInvalidValue;
    DISPATCH(dtype, {
        const auto kernel = aligned<T>(logits, columns) ? logit_statistics<T, PACK<T>> : logit_statistics<T, 1>;
        return launch(kernel, dim3(count), THREADS, 0, stream, static_cast<const T*>(logits),
                      static_cast<const int64_t*>(targets), static_cast<float*>(out), columns, first, rows);
    });
}

extern "C" int cross_entropy_backward(void* logits, const void* targets, const void* log_sum_exp, const void* gradient,
                                      int64_t count, int64_t columns, int64_t first, int64_t rows, int64_t ignored,
                                      int dtype, void* stream) {
    if (rows < 0 || rows > columns) return cudaErrorInvalidValue;
    DISPATCH(dtype, {
        const auto kernel = aligned<T>(logits, columns) ? logit_gradient<T, PACK<T>> : logit_gradient<T, 1>;
        return launch(kernel, dim3(count), THREADS, 0, stream, static_cast<T*>(logits),
                      static_cast<const int64_t*>(targets), static_cast<const float*>(log_sum_exp),
                      static_cast<const float*>(gradient), columns, first, rows, ignored);
    });
}

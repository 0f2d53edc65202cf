// Over many tensors at once: the sum of squares, and AdamW; see adamw.py.
//
// The tensors are cut into chunks of at most CHUNK elements, one per block. `chunks` has a row for each: the tensor's
// number and the chunk's first element. `pointers` has the tensors' addresses and `sizes` their elements.

#include "common.cuh"

constexpr int64_t CHUNK = 65536;  // as in adamw.py
constexpr int THREADS = 512;
constexpr int SUM_THREADS = 1024;

struct Chunk {
    int64_t tensor, first, count;

    DEVICE Chunk(const int64_t* chunks, const int64_t* sizes)
        : tensor(chunks[2 * blockIdx.x]), first(chunks[2 * blockIdx.x + 1]) {
        const int64_t left = sizes[tensor] - first;
        count = left < CHUNK ? left : CHUNK;
    }

    template <typename T>
    DEVICE T* data(const int64_t* pointers) const {
        T* start = reinterpret_cast<T*>(pointers[tensor]);
#ifdef __CUDACC__
        __builtin_assume(__isGlobal(start));  // as the compiler knows of a kernel's arguments
#endif
        return start + first;
    }
};

DEVICE bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

template <typename T, int N>
DEVICE void add_squares(float& sum, const T* data, int64_t first, int64_t last) {
#pragma unroll 4
    for (int64_t i = first + int64_t{threadIdx.x} * N; i < last; i += THREADS * N) {
        float values[N];
        load<N>(data + i, values);
#pragma unroll
        for (int k = 0; k < N; ++k) sum += values[k] * values[k];
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    squares_of_chunk(const int64_t* __restrict__ pointers, const int64_t* __restrict__ sizes,
                     const int64_t* __restrict__ chunks, float* __restrict__ partial) {
    const Chunk chunk(chunks, sizes);
    const T* data = chunk.data<const T>(pointers);
    const int64_t whole = is_aligned(data) ? chunk.count / PACK<T> * PACK<T> : 0;
    float squares = 0.0f;
    add_squares<T, PACK<T>>(squares, data, 0, whole);
    add_squares<T, 1>(squares, data, whole, chunk.count);
    const float sum = block_sum(squares);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(SUM_THREADS)
    squares_of_all(const float* __restrict__ partial, double* __restrict__ out, int64_t count) {
    double total = 0.0;
    for (int64_t i = threadIdx.x; i < count; i += SUM_THREADS) total += static_cast<double>(partial[i]);
    total = block_reduce(total, 0.0, Add());
    if (threadIdx.x == 0) *out = total;
}

// Numbers of a step that the host computes in double. beta1_rest is 1 - beta1, root is 1 / sqrt(1 - beta2^step).
struct Step {
    float rate, size, beta1, beta1_rest, beta2, beta2_rest, root, eps;
};

struct State {
    float *parameter, *exp_avg, *exp_avg_sq;
};

template <typename T, int N>
DEVICE void update(State state, const T* gradient, int64_t first, int64_t last, Step step, float decay, float factor) {
    for (int64_t i = first + int64_t{threadIdx.x} * N; i < last; i += THREADS * N) {
        float p[N], g[N], m[N], v[N];
        load<N>(state.parameter + i, p);
        load<N>(gradient + i, g);
        load<N>(state.exp_avg + i, m);
        load<N>(state.exp_avg_sq + i, v);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            g[k] *= factor;
            p[k] -= decay * p[k];
            m[k] = step.beta1 * m[k] + step.beta1_rest * g[k];
            v[k] = step.beta2 * v[k] + step.beta2_rest * g[k] * g[k];
            p[k] -= step.size * m[k] / (sqrtf(v[k]) * step.root + step.eps);
        }
        store<N>(state.parameter + i, p);
        store<N>(state.exp_avg + i, m);
        store<N>(state.exp_avg_sq + i, v);
    }
}

// pointers is (4, tensors): parameters, gradients, and the two moments.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    adamw_chunk(const int64_t* __restrict__ pointers, const int64_t* __restrict__ sizes,
                const int64_t* __restrict__ chunks, const float* __restrict__ weight_decays,
                const float* __restrict__ factor, int64_t tensors, Step step) {
    const Chunk chunk(chunks, sizes);
    const T* gradient = chunk.data<const T>(pointers + tensors);
    const State state = {chunk.data<float>(pointers), chunk.data<float>(pointers + 2 * tensors),
                         chunk.data<float>(pointers + 3 * tensors)};
    const bool fast = is_aligned(state.parameter) && is_aligned(gradient) && is_aligned(state.exp_avg) &&
                      is_aligned(state.exp_avg_sq);
    const int64_t whole = fast ? chunk.count / 4 * 4 : 0;
    const float decay = step.rate * weight_decays[chunk.tensor];
    update<T, 4>(state, gradient, 0, whole, step, decay, *factor);
    update<T, 1>(state, gradient, whole, chunk.count, step, decay, *factor);
}

extern "C" int sum_of_squares(const void* pointers, const void* sizes, const void* chunks, void* partial, void* out,
                              int64_t count, int dtype, void* stream) {
    DISPATCH(dtype, {
        const int error = launch(squares_of_chunk<T>, static_cast<unsigned>(count), THREADS, 0, stream,
                                 static_cast<const int64_t*>(pointers), static_cast<const int64_t*>(sizes),
                                 static_cast<const int64_t*>(chunks), static_cast<float*>(partial));
        if (error != cudaSuccess) return error;
        return launch(squares_of_all, 1, SUM_THREADS, 0, stream, static_cast<const float*>(partial),
                      static_cast<double*>(out), count);
    })
}

extern "C" int adamw(const void* pointers, const void* sizes, const void* chunks, const void* weight_decays,
                     const void* factor, int64_t tensors, int64_t count, float rate, float size, float beta1,
                     float beta1_rest, float beta2, float beta2_rest, float root, float eps, int dtype, void* stream) {
    const Step step = {rate, size, beta1, beta1_rest, beta2, beta2_rest, root, eps};
    DISPATCH(dtype, {
        return launch(adamw_chunk<T>, static_cast<unsigned>(count), THREADS, 0, stream,
                      static_cast<const int64_t*>(pointers), static_cast<const int64_t*>(sizes),
                      static_cast<const int64_t*>(chunks), static_cast<const float*>(weight_decays),
                      static_cast<const float*>(factor), tensors, step);
    })
}

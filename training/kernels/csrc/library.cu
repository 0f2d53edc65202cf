// What library.py asks: whether a kernel of this build runs on the current device, and the names of errors.

#include "common.cuh"

namespace {
__global__ void probe() {}
}  // namespace

extern "C" int kernels_probe(void* stream) { return launch(probe, 1, 32, 0, stream); }

// The library has a CUDA runtime of its own: PyTorch tells it the device, in autograd's threads, too.
extern "C" int kernels_device(int index) { return cudaSetDevice(index); }

extern "C" const char* kernels_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }

#ifndef __CUDACC__
extern "C" void kernels_order(int reversed) { host::reversed = reversed != 0; }
#endif

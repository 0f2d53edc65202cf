// What library.py asks first: whether a kernel of this build runs on the current device, and the names of errors.

#include "common.cuh"

namespace {
__global__ void probe() {}
}  // namespace

extern "C" int kernels_probe(void* stream) { return launch(probe, 1, 32, 0, stream); }

extern "C" const char* kernels_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }

#ifndef __CUDACC__
extern "C" void kernels_order(int reversed) { host::reversed = reversed != 0; }
#endif

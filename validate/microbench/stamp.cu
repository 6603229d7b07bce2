// A shared library that tells the SM clock of any launches: `stamp` notes each SM's cycle counter and the global timer, and
// cycles over nanoseconds between two stamps of an SM is the mean clock of all that ran between them. Build:
//
//     nvcc -O3 -shared -Xcompiler -fPIC -gencode=arch=compute_90a,code=sm_90a -o libstamp.so stamp.cu
#include <cstdint>
#include <cuda_runtime.h>

#include "ptx.cuh"

struct Stamp {
    uint64_t cycles, ns;
};

// One warp a CTA and as many CTAs as SMs, so that an empty chip gives each SM one; where it gives one two, the later one counts.
__global__ void stamp_kernel(Stamp* sms) {
    if (threadIdx.x == 0) sms[read_smid()] = {read_clock(), read_globaltimer()};
}

// Queues one stamp on `stream`: `sms` holds one entry for each SM. Returns CUDA's status.
extern "C" int stamp(void* sms, int count, void* stream) {
    stamp_kernel<<<count, 32, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<Stamp*>(sms));
    return static_cast<int>(cudaGetLastError());
}

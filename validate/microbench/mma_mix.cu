// What stands beside an mma.sync in the same warp's stream, and an LDSM behind LDGSTS: one CTA, a warp or two a sub-partition.
// A program of its own: nvcc -O3 -std=c++17 -arch=sm_90 -o mma_mix mma_mix.cu; ./mma_mix > mma_mix.csv
#include <cstdint>
#include <cstdio>

#include <cuda_runtime.h>

constexpr int kGroups = 8, kTrips = 512, kSlots = 16;  // groups a trip, one HMMA accumulator each; registers that others work on
constexpr int kCopyBytes = 512, kLdsmAt = 65536;
enum Kind { kFfma, kFmnmx, kEx2, kUlop3, kFmul, kFmulOff, kFmulOn };
const char* const kNames[] = {"ffma", "fmnmx", "ex2", "ulop3", "fmul", "fmul_off", "fmul_on"};

template <int kKind>
__device__ __forceinline__ void other(float& f, int& q, float x, int y) {
    if (kKind == kFfma) asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(f) : "f"(x));
    if (kKind == kFmnmx) asm volatile("max.f32 %0, %0, %1;" : "+f"(f) : "f"(x));
    if (kKind == kEx2) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(f));
    if (kKind == kUlop3)  // all threads have one value: ptxas takes uniform registers
        asm volatile("lop3.b32 %0, %0, %1, %0, 0x96;" : "+r"(q) : "r"(y));
    if (kKind == kFmul) asm volatile("mul.f32 %0, %0, %1;" : "+f"(f) : "f"(x));
    if (kKind == kFmulOff)  // y is never 77; ptxas compares once
        asm volatile("{ .reg .pred p; setp.eq.s32 p, %1, 77; @p mul.f32 %0, %0, %2; }" : "+f"(f) : "r"(y), "f"(x));
    if (kKind == kFmulOn)
        asm volatile("{ .reg .pred p; setp.eq.s32 p, %1, 77; @!p mul.f32 %0, %0, %2; }" : "+f"(f) : "r"(y), "f"(x));
}

template <int kHmma, int kOthers, int kKind>
__global__ void mix(uint32_t* cycles, float* sink, float x, int y) {
    float c[kGroups][4] = {}, f[kSlots];
    uint32_t a[4] = {1, 2, 3, 4}, b[2] = {5, 6};
    int q[kSlots];
    for (int i = 0; i < kSlots; ++i) {
        f[i] = x + i;
        q[i] = y + i;
    }
    __syncthreads();
    uint32_t begin = clock();
    for (int trip = 0; trip < kTrips; ++trip) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            if (kHmma)
                asm volatile(
                    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                    : "+f"(c[g][0]), "+f"(c[g][1]), "+f"(c[g][2]), "+f"(c[g][3])
                    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#pragma unroll
            for (int k = 0; k < kOthers; ++k) other<kKind>(f[(g * kOthers + k) % kSlots], q[(g * kOthers + k) % kSlots], x, y);
        }
    }
    uint32_t end = clock();
    float sum = 0;
    for (auto& row : c) sum += row[0] + row[1] + row[2] + row[3];
    for (int i = 0; i < kSlots; ++i) sum += f[i] + q[i];
    if (sum == 1.2345f) *sink = sum;
    if (threadIdx.x % 32 == 0) cycles[threadIdx.x / 32] = end - begin;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// cycles[0..2]: until all copies are issued, until the LDSM behind them is back, until all have landed; the least of all rounds.
template <int kCopies>
__global__ void behind(const char* from, int rounds, uint32_t* cycles, uint32_t* sink) {
    extern __shared__ __align__(1024) char smem[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t least[3] = {1u << 30, 1u << 30, 1u << 30}, sum = 0;
    for (int round = 0; round < rounds; ++round) {
        const char* source = from + (round * 16 + warp) * 16384;
        __syncthreads();
        uint32_t begin = clock();
#pragma unroll
        for (int i = 0; i < kCopies; ++i)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             shared_address(smem + (warp * kCopies + i) * kCopyBytes + lane * 16)),
                         "l"(source + i * kCopyBytes + lane * 16)
                         : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
        uint32_t issued = clock(), back, r[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(smem + kLdsmAt + warp * kCopyBytes + lane * 16))
                     : "memory");
        sum += r[0] + r[1] + r[2] + r[3];
        asm volatile("{ .reg .u32 t; add.u32 t, %1, 0; mov.u32 %0, %%clock; }" : "=r"(back) : "r"(sum) : "memory");
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        uint32_t landed = clock();
        uint32_t now[3] = {issued - begin, back - begin, landed - begin};
        for (int i = 0; i < 3; ++i)
            if (round > 0) least[i] = min(least[i], now[i]);
        __syncthreads();
    }
    if (threadIdx.x == 0)
        for (int i = 0; i < 3; ++i) cycles[i] = least[i];
    if (sum == 42) *sink = sum;
}

uint32_t* cycles;
float* sink;
char* from;

uint32_t read(int i) {
    uint32_t value[3];
    cudaMemcpy(value, cycles, sizeof(value), cudaMemcpyDeviceToHost);
    if (cudaError_t error = cudaGetLastError()) fprintf(stderr, "%s\n", cudaGetErrorString(error));
    return value[i];
}

template <int kHmma, int kOthers, int kKind>
void row() {
    for (int warps : {1, 2}) {
        for (int warm = 0; warm < 2; ++warm) mix<kHmma, kOthers, kKind><<<1, 128 * warps>>>(cycles, sink, 1.0f, 3);
        double group = read(0) / double(kTrips * kGroups);
        printf("mix,%s,%d,%d,%d,%.3f\n", kOthers ? kNames[kKind] : "hmma alone", kHmma, kOthers, warps, group);
    }
}

template <int kKind>
void rows() {
    row<1, 1, kKind>(), row<1, 2, kKind>(), row<1, 3, kKind>(), row<1, 4, kKind>(), row<1, 6, kKind>(), row<1, 8, kKind>();
    row<0, 1, kKind>(), row<0, 4, kKind>();
}

template <int kCopies>
void copies() {
    const char* names[] = {"issued", "ldsm back", "all landed"};
    cudaFuncSetAttribute(behind<kCopies>, cudaFuncAttributeMaxDynamicSharedMemorySize, kLdsmAt + 8192);
    for (int warps : {1, 4, 8}) {
        if (warps * kCopies * kCopyBytes > kLdsmAt) continue;
        for (int warm = 0; warm < 2; ++warm)
            behind<kCopies><<<1, 32 * warps, kLdsmAt + 8192>>>(from, 8, cycles, reinterpret_cast<uint32_t*>(sink));
        for (int i = 0; i < 3; ++i) printf("behind,%s,,%d,%d,%u\n", names[i], kCopies, warps, read(i));
    }
}

int main() {
    cudaMalloc(&cycles, 4096), cudaMalloc(&sink, 4096), cudaMalloc(&from, 64 << 20), cudaMemset(from, 0, 64 << 20);
    printf("group,name,hmma,n,warps,cycles\n");
    row<1, 0, kFfma>();
    rows<kFfma>(), rows<kFmnmx>(), rows<kEx2>(), rows<kUlop3>(), rows<kFmul>(), rows<kFmulOff>(), rows<kFmulOn>();
    copies<0>(), copies<1>(), copies<2>(), copies<4>(), copies<8>(), copies<16>(), copies<32>();
}

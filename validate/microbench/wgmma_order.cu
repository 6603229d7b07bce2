// In which order do a sub-partition's tensor cores serve two warpgroups? Each warpgroup issues K1 products m64nN1 (A in shared
// memory), commits, K2 products m64nN2 (A in registers), commits, waits for the first group, spins `first` cycles, waits for the
// second, spins `second` cycles, and begins again: FA3's round, with softmax as a spin. Warpgroup 1 starts `lag` cycles late.
// GAP: FMULs on the accumulator of the second product (the rescale of O) after the second product of a round, as at D256.
#include "async_wgmma.cuh"
#include "wgmma.cuh"

constexpr int kRounds = 48, kStamps = 5;

template <int N1, int K1, int N2, int K2, bool kRescale>
__global__ void __launch_bounds__(256, 1)
    order_kernel(uint32_t base, Inputs inputs, int lag, int first, int second, Cycles* stamps, float* sink) {
    extern __shared__ __align__(1024) char smem[];
    fill_tiles(smem, base, 200 * 1024, inputs.bf16x2);
    int group = threadIdx.x / 128;
    Context context = make_context(inputs, smem);
    float s[N1 / 2], o[N2 / 2], scale = 1.0f + context.bits(0) * 1e-30f;
    uint32_t p[K2][4];
    for (float& x : s) x = 0;
    for (float& x : o) x = 0;
    for (int j = 0; j < K2; ++j)
        for (int i = 0; i < 4; ++i) p[j][i] = context.bits(4 * j + i);
    uint64_t q = wgmma_descriptor(base), k = wgmma_descriptor(base + 32 * 1024), v = wgmma_descriptor(base + 96 * 1024);
    if (group == 1) spin_cycles(lag);
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
        Cycles begin = read_clock();
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < (kRescale ? 2 : K1); ++i) Wgmma<N1>::ss(s, q + i % 4 * 2, k + i % 4 * 2);
        if constexpr (kRescale) {
            for (float& x : o) x *= scale;
#pragma unroll
            for (int i = 2; i < K1; ++i) Wgmma<N1>::ss(s, q + i % 4 * 2, k + i % 4 * 2);
        }
        wgmma_commit();
        Cycles issued = read_clock();
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < K2; ++j) Wgmma<N2>::rs(o, p[j], v + j % 4 * 2);
        wgmma_commit();
        Cycles both = read_clock();
        wgmma_wait<1>();
        Cycles one = read_clock();
        spin_cycles(first);
        wgmma_wait<0>();
        Cycles two = read_clock();
        if (threadIdx.x % 128 == 0) {
            Cycles* out = stamps + (group * kRounds + round) * kStamps;
            out[0] = begin; out[1] = issued; out[2] = both; out[3] = one; out[4] = two;
        }
        spin_cycles(second);
        __syncwarp();
    }
    float sum = 0;
    for (float x : s) sum += x;
    for (float x : o) sum += x;
    if (sum == 1.2345e33f) *sink = sum;
}

template <int N1, int K1, int N2, int K2, bool kRescale>
void measure(const StreamInputs& inputs, const char* name) {
    DeviceArray<Cycles> stamps(2 * kRounds * kStamps);
    DeviceArray<float> sink(1);
    auto* kernel = order_kernel<N1, K1, N2, K2, kRescale>;
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
    uint32_t base = smem_base();
    int pauses[4][2] = {{0, 0}, {300, 300}, {600, 600}, {0, 1200}};
    for (auto& pause : pauses)
        for (int lag : {0, 20, 100, 300, 700, 1300}) {
            kernel<<<1, 256, 200 * 1024>>>(base, inputs.view(), lag, pause[0], pause[1], stamps.get(), sink.get());
            finish_launch("order");
            auto t = stamps.to_host(2 * kRounds * kStamps);
            auto at = [&](int g, int r, int i) { return double(t[(g * kRounds + r) * kStamps + i]); };
            printf("%s first=%d second=%d lag=%d period %.1f", name, pause[0], pause[1], lag, (at(0, 40, 0) - at(0, 8, 0)) / 32);
            for (int r : {0, 1, 40}) // both warpgroups on warpgroup 0's clock, from its begin of the round
                for (int g : {0, 1}) {
                    printf(" | r%d g%d:", r, g);
                    for (int i = 0; i < kStamps; ++i) printf(" %.0f", at(g, r, i) - at(0, r, 0));
                }
            printf("\n");
        }
}

int main() {
    StreamInputs inputs;
    printf("stamps of a round: begin, first issued, second issued, first done, second done\n");
    measure<80, 16, 256, 5, false>(inputs, "d256 16xn80 5xn256");
    measure<80, 16, 256, 5, true>(inputs, "d256 with rescale");
    measure<176, 8, 128, 11, false>(inputs, "d128 8xn176 11xn128");
    measure<128, 8, 128, 8, false>(inputs, "d128 8xn128 8xn128");
    measure<64, 8, 256, 2, false>(inputs, "8xn64 2xn256");
}

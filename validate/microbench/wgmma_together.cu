// Do the four warps of a warpgroup's product begin it together? Each warp of one or two warpgroups begins a batch of products at
// its own time; all stamps are on one clock. `late`: a warp begins its batch late. `pause`: a warp pauses amid it, and the rest of
// the batch begins anew. `long`: long batches. `held`: a stream of FMULs from two more warps holds up the tensor core of
// sub-partition 2 alone. `beside_...`: a second warpgroup works as well. A program of its own:
// nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -o together wgmma_together.cu -ldl
#include <vector>

#include "async_wgmma.cuh"
#include "wgmma.cuh"

constexpr int kTurns = 24, kWarmTurns = 8, kStampsOf = 4, kLongBatches = 24;
constexpr int kHeldQuarter = 2;

// Cycles from the turn's start at which each warp of two warpgroups begins, and for how long it pauses amid its batch.
struct Starts {
    int begin[8], pause[8];
};

template <int N, bool kRs>
struct Products {
    float d[N / 2];
    uint32_t p[4];
    uint64_t a, b;
    __device__ void init(const Context& context, uint32_t base) {
        for (float& x : d) x = 0;
        for (int i = 0; i < 4; ++i) p[i] = context.bits(i);
        a = wgmma_descriptor(base), b = wgmma_descriptor(base + 32 * 1024);
    }
    __device__ __forceinline__ void issue(int i) {
        if constexpr (kRs)
            Wgmma<N>::rs(d, p, b + i % 4 * 2);
        else
            Wgmma<N>::ss(d, a + i % 4 * 2, b + i % 4 * 2);
    }
    __device__ float sum() {
        float total = 0;
        for (float x : d) total += x;
        return total;
    }
};

__device__ __forceinline__ void wait_until(Cycles when) {
    while ((long long)(read_clock() - when) < 0) {}
}

// Stamps of a warp and turn: before the fence, after the first product's issue, after the last's, after the wait.
template <int N, bool kRs, int kBatch, bool kPause>
__global__ void __launch_bounds__(256, 1)
    late_kernel(uint32_t base, Inputs inputs, Starts starts, Cycles* stamps, float* sink) {
    extern __shared__ __align__(1024) char smem[];
    fill_tiles(smem, base, 96 * 1024, inputs.bf16x2);
    auto* start = reinterpret_cast<volatile Cycles*>(smem + 96 * 1024);
    int warp = threadIdx.x / 32;
    Products<N, kRs> products;
    products.init(make_context(inputs, smem), base);
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
        __syncthreads();
        if (threadIdx.x == 0) *start = read_clock() + 400;
        __syncthreads();
        Cycles zero = *start;
        wait_until(zero + starts.begin[warp]);
        Cycles begin = read_clock();
        wgmma_fence();
        products.issue(0);
        Cycles first = read_clock();
#pragma unroll
        for (int i = 1; i < kBatch; ++i) {
            if (kPause && i == kBatch / 2) spin_cycles(starts.pause[warp]);
            products.issue(i);
        }
        wgmma_commit();
        Cycles last = read_clock();
        wgmma_wait<0>();
        Cycles done = read_clock();
        if (threadIdx.x % 32 == 0) {
            Cycles* out = stamps + (turn * 8 + warp) * kStampsOf;
            out[0] = begin - zero; out[1] = first - zero; out[2] = last - zero; out[3] = done - zero;
        }
        __syncwarp();
    }
    if (products.sum() == 1.2345e33f) *sink = products.sum();
}

// Two warpgroups of products that always queue; two more warpgroups of which only the warps of one sub-partition work, if at all.
template <int N, bool kRs>
__global__ void __launch_bounds__(512, 1)
    held_kernel(uint32_t base, Inputs inputs, bool held, Cycles* stamps, float* sink) {
    extern __shared__ __align__(1024) char smem[];
    fill_tiles(smem, base, 96 * 1024, inputs.bf16x2);
    auto* finished = reinterpret_cast<volatile int*>(smem + 96 * 1024);
    if (threadIdx.x == 0) *finished = 0;
    __syncthreads();
    int warp = threadIdx.x / 32;
    Context context = make_context(inputs, smem);
    if (warp >= 8) {
        if (!held || warp % 4 != kHeldQuarter) return;
        float o[32], one = 1.0f + context.bits(0) * 1e-30f;
        for (int i = 0; i < 32; ++i) o[i] = context.bounded(i);
        while (*finished == 0)
#pragma unroll
            for (int i = 0; i < 512; ++i) asm volatile("mul.rn.f32 %0, %0, %1;" : "+f"(o[i % 32]) : "f"(one));
        float total = 0;
        for (float x : o) total += x;
        if (total == 1.2345e33f) *sink = total;
        return;
    }
    Products<N, kRs> products;
    products.init(context, base);
#pragma unroll 1
    for (int batch = 0; batch < kLongBatches; ++batch) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i) products.issue(i);
        wgmma_commit();
        wgmma_wait<0>();
        if (threadIdx.x % 32 == 0) stamps[batch * 8 + warp] = read_clock();
        __syncwarp();
    }
    if (warp == 0) *finished = 1;
    if (products.sum() == 1.2345e33f) *sink = products.sum();
}

template <int N, bool kRs, int kBatch, bool kPause>
void measure_late(const StreamInputs& inputs, const char* name, int groups, const Starts& starts) {
    DeviceArray<Cycles> stamps(kTurns * 8 * kStampsOf);
    DeviceArray<float> sink(1);
    auto* kernel = late_kernel<N, kRs, kBatch, kPause>;
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 97 * 1024));
    kernel<<<1, 128 * groups, 97 * 1024>>>(smem_base(), inputs.view(), starts, stamps.get(), sink.get());
    finish_launch("late");
    auto t = stamps.to_host(kTurns * 8 * kStampsOf);
    for (int warp = 0; warp < 4 * groups; ++warp) {
        printf("%s,%d,%s,%d,%d,%d,%d", name, N, kRs ? "rs" : "ss", kBatch, warp, starts.begin[warp], starts.pause[warp]);
        for (int i = 0; i < kStampsOf; ++i) {
            std::vector<double> values;
            for (int turn = kWarmTurns; turn < kTurns; ++turn) // one before the turn's start is negative
                values.push_back(double((long long)t[(turn * 8 + warp) * kStampsOf + i]));
            printf(",%.0f", median(values));
        }
        printf("\n");
    }
}

template <int N, bool kRs, int kBatch>
void measure_shape(const StreamInputs& inputs) {
    for (int late = 0; late < 4; ++late)
        for (int delay : {0, 100, 300, 600, 1000}) {
            Starts starts{};
            starts.begin[late] = delay;
            measure_late<N, kRs, kBatch, false>(inputs, "late", 1, starts);
        }
    for (int delay : {300, 1000, 3000}) // warpgroup 0's warp 2 is late; warpgroup 1 begins 100 cycles after the others, or before
        for (int other : {-100, 100}) {
            Starts starts{};
            starts.begin[2] = delay;
            for (int w = 4; w < 8; ++w) starts.begin[w] = other;
            measure_late<N, kRs, kBatch, false>(inputs, "beside_late", 2, starts);
        }
    if constexpr (kBatch > 1)
        for (int pause : {0, 300, 1000, 3000}) {
            Starts starts{};
            starts.pause[2] = pause;
            measure_late<N, kRs, kBatch, true>(inputs, "pause", 1, starts);
            for (int w = 4; w < 8; ++w) starts.begin[w] = 100;
            measure_late<N, kRs, kBatch, true>(inputs, "beside_pause", 2, starts);
        }
}

// Batches that no queue can hold: which warps' issue waits for a place beside another warpgroup's?
template <int N, bool kRs>
void measure_long(const StreamInputs& inputs) {
    Starts starts{};
    for (int w = 4; w < 8; ++w) starts.begin[w] = 100;
    measure_late<N, kRs, 24, false>(inputs, "long", 1, Starts{});
    measure_late<N, kRs, 24, false>(inputs, "beside_long", 2, starts);
}

template <int N, bool kRs>
void measure_held(const StreamInputs& inputs) {
    DeviceArray<Cycles> stamps(kLongBatches * 8);
    DeviceArray<float> sink(1);
    auto* kernel = held_kernel<N, kRs>;
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 97 * 1024));
    for (int held = 0; held < 2; ++held) {
        for (int repeat = 0; repeat < 2; ++repeat) {
            kernel<<<1, 512, 97 * 1024>>>(smem_base(), inputs.view(), held, stamps.get(), sink.get());
            finish_launch("held");
        }
        auto t = stamps.to_host(kLongBatches * 8);
        for (int warp = 0; warp < 8; ++warp) { // cycles from the end of batch 4 to that of each later one that is shown
            printf("%s,%d,%s,8,%d,0,0", held ? "held" : "free", N, kRs ? "rs" : "ss", warp);
            for (int batch : {5, 8, 14, 20}) printf(",%.0f", double(t[batch * 8 + warp]) - double(t[4 * 8 + warp]));
            printf("\n");
        }
    }
}

int main() {
    StreamInputs inputs;
    printf("# stamps: begin, first issued, last issued, done; of held and free from the end of batch 4 to that of 5, 8, 14, 20\n");
    printf("case,n,a,batch,warp,late,pause,stamp0,stamp1,stamp2,stamp3\n");
    measure_shape<128, false, 1>(inputs);
    measure_shape<128, false, 8>(inputs);
    measure_shape<128, true, 1>(inputs);
    measure_shape<128, true, 8>(inputs);
    measure_shape<256, false, 1>(inputs);
    measure_shape<256, false, 8>(inputs);
    measure_shape<256, true, 1>(inputs);
    measure_shape<256, true, 8>(inputs);
    measure_long<128, false>(inputs);
    measure_long<128, true>(inputs);
    measure_held<128, false>(inputs);
    measure_held<128, true>(inputs);
}

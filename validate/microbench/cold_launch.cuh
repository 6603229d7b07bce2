// What a launch takes beside its CTAs' work: by shared memory, cluster, threads, arguments and what it does to memory. Periods of
// graphs without a profiler; under one (`launches`) each kernel once, its name and order on stdout.
#pragma once

#include "cold_state.cuh"

enum Touch { kNothing, kLoad, kStore, kStoreAll };
struct Words {
    unsigned word[960];
};

template <int kTouch, class Argument>
__global__ void hardly_anything(float* at, const __grid_constant__ Argument argument) {
    if (kTouch == kNothing) return;
    size_t mine = kTouch == kStoreAll ? blockIdx.x * size_t(blockDim.x) + threadIdx.x : blockIdx.x * 64;
    if (kTouch != kStoreAll && threadIdx.x) return;
    if (kTouch == kLoad) {
        float value;
        asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(at + mine) : "memory");
        if (value == 1.2345f) at[mine] = 0;
    } else {
        at[mine] = 1.0f;
    }
}

struct LaunchShape {
    int smem_kib, cluster, threads, ctas_per_sm;
    Touch touch;
    bool long_arguments;
};

inline std::string described(const LaunchShape& s) {
    static const char* touches[] = {"nothing", "load", "store", "store_all"};
    return "smem_kib=" + std::to_string(s.smem_kib) + " cluster=" + std::to_string(s.cluster) + " threads=" + std::to_string(s.threads) +
           " ctas_per_sm=" + std::to_string(s.ctas_per_sm) + " touch=" + touches[s.touch] + " argument_bytes=" + (s.long_arguments ? "3840" : "4");
}

template <class Argument>
void start_as(const Bench& bench, const LaunchShape& s, float* at, cudaStream_t stream) {
    void (*kernels[])(float*, const Argument) = {hardly_anything<kNothing, Argument>, hardly_anything<kLoad, Argument>,
                                                hardly_anything<kStore, Argument>, hardly_anything<kStoreAll, Argument>};
    auto kernel = kernels[s.touch];
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024));
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(bench.sms * s.ctas_per_sm);
    config.blockDim = dim3(s.threads);
    config.dynamicSmemBytes = s.smem_kib * 1024;
    config.stream = stream;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = s.cluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.attrs = &cluster;
    config.numAttrs = s.cluster > 1;
    CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, at, Argument{}));
}

inline void start(const Bench& bench, const LaunchShape& s, float* at, cudaStream_t stream = nullptr) {
    if (s.long_arguments)
        start_as<Words>(bench, s, at, stream);
    else
        start_as<unsigned>(bench, s, at, stream);
}

inline std::vector<LaunchShape> launch_shapes() {
    std::vector<LaunchShape> shapes;
    for (int smem : {0, 48, 100, 227})
        for (int cluster : {1, 2})
            for (int threads : {128, 384}) shapes.push_back({smem, cluster, threads, 1, kNothing, false});
    for (Touch touch : {kLoad, kStore, kStoreAll}) shapes.push_back({0, 1, 128, 1, touch, false}), shapes.push_back({227, 1, 384, 1, touch, false});
    shapes.push_back({227, 2, 384, 1, kNothing, true});
    shapes.push_back({66, 1, 128, 2, kNothing, false});
    shapes.push_back({66, 1, 128, 2, kNothing, true});
    shapes.push_back({66, 1, 128, 4, kNothing, false});
    return shapes;
}

// Under a profiler: each shape after its own kind, after no shared memory and after 227 KiB. A line a launch, in order.
inline void profile_launches(const Bench& bench) {
    float* at = nullptr;
    CHECK_CUDA(cudaMalloc(&at, 64 << 20));
    LaunchShape none{0, 1, 128, 1, kNothing, false}, most{227, 1, 128, 1, kNothing, false};
    for (const LaunchShape& shape : launch_shapes())
        for (int before = 0; before < 3; ++before) {
            const LaunchShape& first = before == 0 ? shape : before == 1 ? none : most;
            for (const LaunchShape& each : {first, shape}) {
                start(bench, each, at);
                CHECK_CUDA(cudaDeviceSynchronize());
                std::printf("LAUNCH %s before=%s\n", described(each).c_str(), &each == &first ? "none" : before == 0 ? "same" : before == 1 ? "0" : "227");
                std::fflush(stdout);
            }
        }
}

// ns a kernel of graphs of 200 kernels, one kind or two in turn.
inline void measure_periods(const Bench& bench) {
    float* at = nullptr;
    CHECK_CUDA(cudaMalloc(&at, 64 << 20));
    cudaStream_t stream;
    CHECK_CUDA(cudaStreamCreate(&stream));
    auto period = [&](const LaunchShape& a, const LaunchShape& b) {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < 100; ++i) start(bench, a, at, stream), start(bench, b, at, stream);
        CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
        CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
        cudaEvent_t begin, end;
        CHECK_CUDA(cudaEventCreate(&begin));
        CHECK_CUDA(cudaEventCreate(&end));
        std::vector<unsigned> ns;
        for (int repeat = 0; repeat < 7; ++repeat) {
            CHECK_CUDA(cudaGraphLaunch(exec, stream));
            CHECK_CUDA(cudaEventRecord(begin, stream));
            for (int i = 0; i < 5; ++i) CHECK_CUDA(cudaGraphLaunch(exec, stream));
            CHECK_CUDA(cudaEventRecord(end, stream));
            CHECK_CUDA(cudaStreamSynchronize(stream));
            float ms = 0;
            CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
            ns.push_back(unsigned(ms * 1e6f / 1000));
        }
        std::sort(ns.begin(), ns.end());
        CHECK_CUDA(cudaGraphExecDestroy(exec));
        CHECK_CUDA(cudaGraphDestroy(graph));
        return ns;
    };
    LaunchShape none{0, 1, 128, 1, kNothing, false};
    for (const LaunchShape& shape : launch_shapes()) {
        auto alone = period(shape, shape), turns = period(shape, none);
        std::printf("graph_period_ns,alone,%d,%d,%s,0,%u,%u,%u\n", bench.sms * shape.ctas_per_sm, shape.threads / 32, described(shape).c_str(), alone[0], alone[3], alone[6]);
        std::printf("graph_period_ns,in_turn_with_none,%d,%d,%s,0,%u,%u,%u\n", bench.sms * shape.ctas_per_sm, shape.threads / 32, described(shape).c_str(), turns[0], turns[3], turns[6]);
        std::fflush(stdout);
    }
}

__global__ void spin_for(long long cycles) {
    long long begin = clock64();
    while (clock64() - begin < cycles) {
    }
}

// ns beside its CTAs' own cycles of a kernel that spins: between events after 256 MiB were written, as do_bench times; a kernel of a
// stream without gaps; a kernel of a graph.
inline void measure_overheads(const Bench& bench) {
    char* flush = nullptr;
    CHECK_CUDA(cudaMalloc(&flush, kFlushBytes));
    cudaEvent_t begin, end;
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    cudaStream_t stream;
    CHECK_CUDA(cudaStreamCreate(&stream));
    for (int cycles : {1000, 20000, 100000}) {
        auto start_spin = [&] { spin_for<<<bench.sms, 128, 0, stream>>>(cycles); };
        std::vector<double> timed, loop, graph;
        float ms = 0;
        for (int repeat = 0; repeat < 40; ++repeat) {
            CHECK_CUDA(cudaMemsetAsync(flush, repeat, kFlushBytes, stream));
            CHECK_CUDA(cudaEventRecord(begin, stream));
            start_spin();
            CHECK_CUDA(cudaEventRecord(end, stream));
            CHECK_CUDA(cudaStreamSynchronize(stream));
            CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
            timed.push_back(ms * 1e6);
        }
        for (int repeat = 0; repeat < 9; ++repeat) {
            CHECK_CUDA(cudaMemsetAsync(flush, repeat, kFlushBytes, stream));
            CHECK_CUDA(cudaEventRecord(begin, stream));
            for (int i = 0; i < 200; ++i) start_spin();
            CHECK_CUDA(cudaEventRecord(end, stream));
            CHECK_CUDA(cudaStreamSynchronize(stream));
            CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
            loop.push_back(ms * 1e6 / 200);
        }
        cudaGraph_t made;
        cudaGraphExec_t exec;
        CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < 200; ++i) start_spin();
        CHECK_CUDA(cudaStreamEndCapture(stream, &made));
        CHECK_CUDA(cudaGraphInstantiate(&exec, made, 0));
        for (int repeat = 0; repeat < 9; ++repeat) {
            CHECK_CUDA(cudaGraphLaunch(exec, stream));
            CHECK_CUDA(cudaEventRecord(begin, stream));
            CHECK_CUDA(cudaGraphLaunch(exec, stream));
            CHECK_CUDA(cudaEventRecord(end, stream));
            CHECK_CUDA(cudaStreamSynchronize(stream));
            CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
            graph.push_back(ms * 1e6 / 200);
        }
        for (auto [name, of] : {std::pair{"between_events_ns", &timed}, {"stream_ns", &loop}, {"graph_ns", &graph}}) {
            std::sort(of->begin(), of->end());
            std::printf("spin_kernel,%s,%d,4,spin_cycles=%d,0,%.0f,%.0f,%.0f\n", name, bench.sms, cycles, of->front(), (*of)[of->size() / 2], of->back());
        }
        std::fflush(stdout);
    }
}

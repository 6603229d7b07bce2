// Group `launch`: what a kernel costs beside its work, in microseconds.
#pragma once

#include "report.cuh"

__global__ void empty_kernel() {}

inline double launch_period_us(int ctas, int count) {
    EventTimer timer;
    timer.start();
    for (int i = 0; i < count; ++i) empty_kernel<<<ctas, 128>>>();
    CHECK_CUDA(cudaGetLastError());
    return timer.stop_ms() * 1e3 / count;
}

// A graph of `nodes` empty kernels in a row, replayed once per repeat.
inline std::vector<double> graph_period_us(int ctas, int nodes) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK_CUDA(cudaStreamCreate(&stream));
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < nodes; ++i) empty_kernel<<<ctas, 128, 0, stream>>>();
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    std::vector<double> values;
    EventTimer timer;
    for (int repeat = -1; repeat < kRepeats; ++repeat) {
        timer.start(stream);
        CHECK_CUDA(cudaGraphLaunch(executable, stream));
        double us = timer.stop_ms(stream) * 1e3 / nodes;
        if (repeat >= 0) values.push_back(us);
    }
    CHECK_CUDA(cudaGraphExecDestroy(executable));
    CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_CUDA(cudaStreamDestroy(stream));
    return values;
}

inline void measure_launch(const Device& device) {
    std::vector<double> period, fixed, gap;
    EventTimer timer;
    for (int repeat = -1; repeat < kRepeats; ++repeat) {
        double us = launch_period_us(1, 2000);
        CHECK_CUDA(cudaDeviceSynchronize());
        timer.start();
        double nothing = timer.stop_ms() * 1e3;
        timer.start();
        empty_kernel<<<1, 128>>>();
        CHECK_CUDA(cudaGetLastError());
        double one = timer.stop_ms() * 1e3;
        if (repeat < 0) continue;
        period.push_back(us);
        fixed.push_back(one);
        gap.push_back(nothing);
    }
    print_row("launch", "stream_period", 4, "ctas=1", period, "us");
    print_row("launch", "one_kernel_between_events", 4, "ctas=1", fixed, "us");
    print_row("launch", "nothing_between_events", 4, "", gap, "us");
    std::vector<double> durations[4];
    int multiples[4] = {0, 1, 10, 100};
    for (int k = 0; k < 4; ++k) {
        int ctas = std::max(1, device.sms * multiples[k]);
        durations[k] = graph_period_us(ctas, k < 3 ? 1000 : 200);
        print_row("launch", "graph_period", 4, "ctas=" + std::to_string(ctas), durations[k], "us");
        if (k) {
            std::vector<double> stream;
            for (int repeat = 0; repeat < kRepeats; ++repeat) stream.push_back(launch_period_us(ctas, 500));
            print_row("launch", "stream_period", 4, "ctas=" + std::to_string(ctas), stream, "us");
        }
    }
    std::vector<double> per_cta;
    for (int i = 0; i < kRepeats; ++i)
        per_cta.push_back((durations[3][i] - durations[2][i]) * 1e3 / (device.sms * (multiples[3] - multiples[2])));
    print_row("launch", "per_cta_dispatch", 4, "slope_10_to_100_ctas_per_sm", per_cta, "ns");
}

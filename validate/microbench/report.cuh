// How a reading leaves the program: CUDA calls are checked, repeats become one CSV row on stdout, progress goes to stderr.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#define CHECK_CUDA(call)                                                                             \
    do {                                                                                             \
        cudaError_t status_ = (call);                                                                \
        if (status_ != cudaSuccess) {                                                                \
            std::fprintf(stderr, "%s:%d: %s failed: %s\n", __FILE__, __LINE__, #call,                \
                         cudaGetErrorString(status_));                                               \
            std::exit(1);                                                                            \
        }                                                                                            \
    } while (0)

constexpr int kRepeats = 7;

inline double quantile(std::vector<double> values, double q) {
    std::sort(values.begin(), values.end());
    double position = q * (values.size() - 1);
    size_t below = static_cast<size_t>(position);
    size_t above = std::min(below + 1, values.size() - 1);
    return values[below] + (position - below) * (values[above] - values[below]);
}

inline double median(const std::vector<double>& values) { return quantile(values, 0.5); }

inline double mean(const std::vector<double>& values) {
    double total = 0;
    for (double v : values) total += v;
    return values.empty() ? 0 : total / values.size();
}

inline void print_header() { std::printf("group,name,warps,param,value,unit,spread,repeats\n"); }

// One CSV row: the median over repeats; spread is (max - min) / median.
inline void print_row(const char* group, const std::string& name, int warps, const std::string& param,
                      const std::vector<double>& repeats, const char* unit) {
    if (repeats.empty()) return;
    double mid = median(repeats);
    double range = quantile(repeats, 1.0) - quantile(repeats, 0.0);
    std::printf("%s,%s,%d,%s,%.6g,%s,%.4f,%zu\n", group, name.c_str(), warps, param.c_str(), mid, unit,
                mid != 0 ? range / std::fabs(mid) : 0.0, repeats.size());
    std::fflush(stdout);
}

inline void progress(const std::string& text) { std::fprintf(stderr, "[microbench] %s\n", text.c_str()); }

// An owned device array; freed with the scope, so a group leaves no memory behind.
template <class T>
class DeviceArray {
  public:
    explicit DeviceArray(size_t count) : count_(count) {
        CHECK_CUDA(cudaMalloc(&data_, count * sizeof(T)));
        CHECK_CUDA(cudaMemset(data_, 0, count * sizeof(T)));
    }
    ~DeviceArray() { cudaFree(data_); }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;

    T* get() const { return data_; }
    size_t count() const { return count_; }
    std::vector<T> to_host(size_t count) const {
        std::vector<T> host(count);
        CHECK_CUDA(cudaMemcpy(host.data(), data_, count * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
    void from_host(const std::vector<T>& host) {
        CHECK_CUDA(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    }

  private:
    T* data_ = nullptr;
    size_t count_;
};

// Events around a stretch of the default stream, in milliseconds.
class EventTimer {
  public:
    EventTimer() {
        CHECK_CUDA(cudaEventCreate(&begin_));
        CHECK_CUDA(cudaEventCreate(&end_));
    }
    ~EventTimer() {
        cudaEventDestroy(begin_);
        cudaEventDestroy(end_);
    }
    void start(cudaStream_t stream = nullptr) { CHECK_CUDA(cudaEventRecord(begin_, stream)); }
    double stop_ms(cudaStream_t stream = nullptr) {
        CHECK_CUDA(cudaEventRecord(end_, stream));
        CHECK_CUDA(cudaEventSynchronize(end_));
        float ms = 0;
        CHECK_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
        return ms;
    }

  private:
    cudaEvent_t begin_, end_;
};

struct Device {
    int sms;
    int major;
    size_t smem_per_sm;
    size_t smem_per_cta;
    size_t l2_bytes;
};

inline Device query_device() {
    int id = 0;
    CHECK_CUDA(cudaSetDevice(id));
    cudaDeviceProp prop;
    CHECK_CUDA(cudaGetDeviceProperties(&prop, id));
    Device device{prop.multiProcessorCount, prop.major, prop.sharedMemPerMultiprocessor, prop.sharedMemPerBlockOptin,
                  static_cast<size_t>(prop.l2CacheSize)};
    std::fprintf(stderr, "[microbench] %s, %d SMs, %zu KiB SMEM per SM, %zu MiB L2\n", prop.name, device.sms,
                 device.smem_per_sm >> 10, device.l2_bytes >> 20);
    return device;
}

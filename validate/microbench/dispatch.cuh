// Group `dispatch`: where and when the hardware starts CTAs. Three rounds of CTAs that spin for 50,000 cycles, sized so that
// one or two fit on an SM; each notes its SM and its start and end on both clocks. The raw table goes to --dispatch-csv.
#pragma once

#include <map>

#include "report.cuh"
#include "ptx.cuh"

struct CtaRecord {
    unsigned long long clock_begin, clock_end, ns_begin, ns_end;
    unsigned smid;
};

constexpr int kSpinCycles = 50000;

__global__ void spin_kernel(CtaRecord* records) {
    CtaRecord r{};
    r.clock_begin = read_clock();
    r.ns_begin = read_globaltimer();
    r.smid = read_smid();
    while (read_clock() - r.clock_begin < kSpinCycles) {
    }
    __syncthreads();
    r.ns_end = read_globaltimer();
    r.clock_end = read_clock();
    if (threadIdx.x == 0) records[blockIdx.x] = r;
}

struct DispatchReading {
    double distinct_sms, round_span_ns, wave_span_ns;
    std::vector<double> second_lag, replace_lag;
};

// `clock64` of two SMs cannot be compared, so lags are taken within an SM and the span on the global timer.
inline DispatchReading read_dispatch(const std::vector<CtaRecord>& records, int sms, int fit) {
    DispatchReading reading{};
    std::map<unsigned, std::vector<CtaRecord>> by_sm;
    std::map<unsigned, int> first_round;
    unsigned long long first = ~0ull, last = 0, wave_last = 0;
    for (size_t i = 0; i < records.size(); ++i) {
        by_sm[records[i].smid].push_back(records[i]);
        if (i < size_t(sms)) {
            ++first_round[records[i].smid];
            first = std::min(first, records[i].ns_begin);
            last = std::max(last, records[i].ns_begin);
        }
    }
    reading.distinct_sms = double(first_round.size());
    for (size_t i = 0; i < size_t(sms) * fit; ++i) wave_last = std::max(wave_last, records[i].ns_begin);
    reading.round_span_ns = double(last - first);
    reading.wave_span_ns = double(wave_last - first);
    for (auto& entry : by_sm) {
        auto& ctas = entry.second;
        std::vector<unsigned long long> begins, ends;
        for (const auto& c : ctas) begins.push_back(c.clock_begin), ends.push_back(c.clock_end);
        std::sort(begins.begin(), begins.end());
        std::sort(ends.begin(), ends.end());
        if (fit > 1 && begins.size() > 1) reading.second_lag.push_back(double(begins[1] - begins[0]));
        for (size_t k = 0; k + fit < begins.size(); ++k)
            reading.replace_lag.push_back(double(begins[k + fit]) - double(ends[k]));
    }
    return reading;
}

inline void print_dispatch(const std::vector<DispatchReading>& readings, int fit) {
    std::string param = "fit=" + std::to_string(fit);
    std::vector<double> distinct, round_span, wave_span, lag[3], replace[3];
    const double at[3] = {0.5, 0.0, 1.0};
    for (const auto& r : readings) {
        distinct.push_back(r.distinct_sms);
        round_span.push_back(r.round_span_ns);
        wave_span.push_back(r.wave_span_ns);
        for (int i = 0; i < 3; ++i) {
            if (!r.second_lag.empty()) lag[i].push_back(quantile(r.second_lag, at[i]));
            if (!r.replace_lag.empty()) replace[i].push_back(quantile(r.replace_lag, at[i]));
        }
    }
    print_row("dispatch", "first_round_distinct_sms", 4, param, distinct, "sms");
    print_row("dispatch", "dispatch_span_ns", 4, param + " one_per_sm", round_span, "ns");
    print_row("dispatch", "dispatch_span_ns", 4, param + " all_resident", wave_span, "ns");
    const char* which[3] = {" median", " min", " max"};
    for (int i = 0; i < 3; ++i) {
        print_row("dispatch", "second_cta_lag", 4, param + which[i], lag[i], "cycles");
        print_row("dispatch", "replace_lag", 4, param + which[i], replace[i], "cycles");
    }
}

inline void measure_dispatch_fit(const Device& device, int fit, FILE* table) {
    int reserve = 1024; // the driver's share of each CTA's shared memory
    int smem = static_cast<int>(std::min(device.smem_per_sm / fit - reserve, device.smem_per_cta)) / 1024 * 1024;
    CHECK_CUDA(cudaFuncSetAttribute(spin_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    int resident = 0;
    CHECK_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, spin_kernel, 128, smem));
    if (resident != fit) return progress("dispatch: occupancy " + std::to_string(resident) + ", wanted " + std::to_string(fit));
    int ctas = device.sms * fit * 3;
    DeviceArray<CtaRecord> records(ctas);
    std::vector<DispatchReading> readings;
    for (int repeat = -1; repeat < kRepeats; ++repeat) {
        spin_kernel<<<ctas, 128, smem>>>(records.get());
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaDeviceSynchronize());
        if (repeat < 0) continue;
        auto host = records.to_host(ctas);
        readings.push_back(read_dispatch(host, device.sms, fit));
        for (int i = 0; table && i < ctas; ++i)
            std::fprintf(table, "%d,%d,%d,%u,%llu,%llu,%llu,%llu\n", fit, repeat, i, host[i].smid, host[i].clock_begin,
                         host[i].clock_end, host[i].ns_begin, host[i].ns_end);
    }
    print_dispatch(readings, fit);
}

inline void measure_dispatch(const Device& device, const std::string& table_path) {
    FILE* table = table_path.empty() ? nullptr : std::fopen(table_path.c_str(), "w");
    if (!table_path.empty() && !table) progress("dispatch: cannot write " + table_path);
    if (table) std::fprintf(table, "fit,repeat,cta,smid,start_clock,end_clock,start_ns,end_ns\n");
    for (int fit : {2, 1}) measure_dispatch_fit(device, fit, table);
    if (table) std::fclose(table);
}

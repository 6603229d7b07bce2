// The NVML calls that `power` needs, loaded at run time so that the build needs neither header nor stub library.
#pragma once

#include <dlfcn.h>

#include "report.cuh"

class Nvml {
  public:
    Nvml() {
        void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        if (!library) {
            progress("power: libnvidia-ml.so.1 not found, watts will be missing");
            return;
        }
        auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
        auto handle = reinterpret_cast<int (*)(const char*, void**)>(dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2"));
        energy_ = reinterpret_cast<EnergyCall>(dlsym(library, "nvmlDeviceGetTotalEnergyConsumption"));
        power_ = reinterpret_cast<PowerCall>(dlsym(library, "nvmlDeviceGetPowerUsage"));
        heat_ = reinterpret_cast<HeatCall>(dlsym(library, "nvmlDeviceGetTemperature"));
        clock_ = reinterpret_cast<HeatCall>(dlsym(library, "nvmlDeviceGetClockInfo"));
        samples_ = reinterpret_cast<SamplesCall>(dlsym(library, "nvmlDeviceGetSamples"));
        char bus[32];
        CHECK_CUDA(cudaDeviceGetPCIBusId(bus, sizeof bus, 0));
        ready_ = init && handle && energy_ && power_ && init() == 0 && handle(bus, &device_) == 0;
        if (!ready_) progress("power: NVML did not initialise, watts will be missing");
    }

    bool ready() const { return ready_; }
    // Energy since the driver was loaded in joules, or a negative number.
    double energy_j() const {
        unsigned long long mj = 0;
        return ready_ && energy_(device_, &mj) == 0 ? mj * 1e-3 : -1;
    }
    // Mean of the driver's power samples (some 20 ms apart, kept for about two seconds) between two times of the system clock in
    // microseconds, in watts, or a negative number. One call after a run: any call during it holds launches up for milliseconds.
    double sampled_power_w(unsigned long long begin_us, unsigned long long end_us) const {
        unsigned count = 0;
        int type = 0;
        if (!ready_ || !samples_ || samples_(device_, 0, begin_us, &type, &count, nullptr) != 0) return -1;
        std::vector<Sample> samples(count);
        if (samples_(device_, 0, begin_us, &type, &count, samples.data()) != 0) return -1;
        double total = 0;
        int used = 0;
        for (unsigned i = 0; i < count; ++i)
            if (samples[i].us >= begin_us && samples[i].us <= end_us) total += samples[i].milliwatts * 1e-3, ++used;
        return used ? total / used : -1;
    }
    // The driver's own reading in watts (on this generation an average over about a second), or a negative number.
    double average_power_w() const {
        unsigned mw = 0;
        return ready_ && power_(device_, &mw) == 0 ? mw * 1e-3 : -1;
    }

    // What the driver says the SM clock is, in MHz, or a negative number: read it while the chip is busy.
    double reported_mhz() const {
        unsigned mhz = 0;
        return ready_ && clock_ && clock_(device_, 1, &mhz) == 0 ? double(mhz) : -1;
    }
    // Of the chip in degrees Celsius, or a negative number.
    double temperature_c() const {
        unsigned celsius = 0;
        return ready_ && heat_ && heat_(device_, 0, &celsius) == 0 ? double(celsius) : -1;
    }

  private:
    using EnergyCall = int (*)(void*, unsigned long long*);
    using PowerCall = int (*)(void*, unsigned*);
    struct Sample {
        unsigned long long us;
        unsigned milliwatts, high;
    };
    using SamplesCall = int (*)(void*, int, unsigned long long, int*, unsigned*, Sample*);
    SamplesCall samples_ = nullptr;
    using HeatCall = int (*)(void*, int, unsigned*);
    HeatCall heat_ = nullptr, clock_ = nullptr;
    EnergyCall energy_ = nullptr;
    PowerCall power_ = nullptr;
    void* device_ = nullptr;
    bool ready_ = false;
};

// The three NVML calls that `power` needs, loaded at run time so that the build needs neither header nor stub library.
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
    // The driver's own reading in watts (on this generation an average over about a second), or a negative number.
    double average_power_w() const {
        unsigned mw = 0;
        return ready_ && power_(device_, &mw) == 0 ? mw * 1e-3 : -1;
    }

  private:
    using EnergyCall = int (*)(void*, unsigned long long*);
    using PowerCall = int (*)(void*, unsigned*);
    EnergyCall energy_ = nullptr;
    PowerCall power_ = nullptr;
    void* device_ = nullptr;
    bool ready_ = false;
};

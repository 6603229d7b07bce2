// What a launch pays once: arguments, tensor maps and pages that it uses for the first time, and the launch itself.
//   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -o cold_start cold_start.cu
//   ./cold_start > cold_start.csv
//   ncu --clock-control none --cache-control all --metrics sm__cycles_elapsed.max ./cold_start profiled > as_the_profiler_leaves.csv
//   ncu --clock-control none --csv --metrics sm__cycles_elapsed.max ./cold_start launches
#include "cold_data.cuh"
#include "cold_launch.cuh"

int main(int count, char** words) {
    std::string how = count > 1 ? words[1] : "";
    Bench bench(how == "profiled");
    if (how == "launches") {
        profile_launches(bench);
        return 0;
    }
    measure_data(bench);
    if (how.empty()) measure_periods(bench), measure_overheads(bench);
}

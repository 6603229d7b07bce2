// What it costs to run code for the first time: straight lines passed three times, and blocks in scattered order.
//   nvcc -O3 -std=c++17 -arch=sm_90 -o cold_code cold_code.cu; ./cold_code > cold_code.csv
//   ncu --clock-control none --cache-control all --metrics sm__cycles_elapsed.max ./cold_code profiled > as_the_profiler_leaves.csv
#include "cold_code.cuh"

int main(int count, char**) {
    Bench bench(count > 1);
    measure_code(bench);
}

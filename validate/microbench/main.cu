// flashsim's microbenchmarks: `./microbench [groups...] [--dispatch-csv PATH]`, CSV on stdout, all groups by default.
#include <chrono>
#include <cstring>

#include "issue.cuh"
#include "wgmma.cuh"

struct Group {
    const char* name;
    void (*run)(const Device&);
};

int main(int, char**) {
    Device d = query_device();
    measure_issue(d);
    measure_pair(d); measure_wgmma(d);
}

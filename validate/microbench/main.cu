// flashsim's microbenchmarks: `./microbench [groups...] [--dispatch-csv PATH]`, CSV on stdout, all groups by default.
#include "async.cuh"
#include "dispatch.cuh"
#include "issue.cuh"
#include "latency.cuh"
#include "launch.cuh"
#include "memory.cuh"
#include "pair.cuh"
#include "power.cuh"
#include "sync.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "wgmma_beside.cuh"

struct Group {
    const char* name;
    std::function<void(const Device&)> run;
};

int main(int argc, char** argv) {
    std::string dispatch_csv;
    std::vector<std::string> wanted;
    for (int i = 1; i < argc; ++i) {
        std::string argument = argv[i];
        if (argument == "--dispatch-csv" && i + 1 < argc)
            dispatch_csv = argv[++i];
        else
            wanted.push_back(argument);
    }
    const std::vector<Group> groups = {
        {"issue", measure_issue},
        {"latency", measure_latency},
        {"pair", measure_pair},
        {"wgmma", measure_wgmma},
        {"beside", measure_beside},
        {"sync", measure_sync},
        {"async", measure_async},
        {"tma", measure_tma},
        {"dispatch", [&](const Device& device) { measure_dispatch(device, dispatch_csv); }},
        {"launch", measure_launch},
        {"memory", measure_memory},
        {"power", measure_power},
    };
    for (const auto& name : wanted) {
        bool known = false;
        for (const auto& group : groups) known = known || name == group.name;
        if (known) continue;
        std::fprintf(stderr, "[microbench] got group '%s'; allowed:", name.c_str());
        for (const auto& group : groups) std::fprintf(stderr, " %s", group.name);
        std::fprintf(stderr, "\n");
        return 2;
    }
    Device device = query_device();
    print_header();
    for (const auto& group : groups) {
        if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), group.name) == wanted.end()) continue;
        double begin = seconds_now();
        progress(std::string(group.name) + " ...");
        group.run(device);
        progress(std::string(group.name) + " took " + std::to_string(seconds_now() - begin) + " s");
    }
    return 0;
}

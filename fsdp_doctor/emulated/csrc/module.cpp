// What Python sees. Everything else reaches the device through PyTorch's own registries.
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "device.h"
#include "fallback.h"
#include "gloo.h"
#include "memory.h"
#include "neighbours.h"
#include "races.h"
#include "streams.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emulated;

  m.def("register_device", [] {
    register_hooks();
    register_kernels();
    register_gloo();
  });
  m.def("initialize", &initialize);
  m.def("is_initialized", &is_initialized);
  m.def("is_in_bad_fork", &is_in_bad_fork);
  m.def("set_device_count", &set_device_count);
  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("exchange_device", &exchange_device);
  m.def("default_generator", [](c10::DeviceIndex device) { return default_generator(device); });

  m.def("memory_stats", [](c10::DeviceIndex device) {
    const auto stats = memory_stats(device);
    py::dict result;
    result["allocated"] = stats.allocated;
    result["peak"] = stats.peak;
    result["allocations"] = stats.allocations;
    result["reserved"] = stats.reserved;
    result["reserved_peak"] = stats.reserved_peak;
    result["split"] = stats.split;
    result["segments"] = stats.segments;
    result["retries"] = stats.retries;
    result["refusals"] = stats.refusals;
    result["limit"] = stats.limit;
    return result;
  });
  m.def("memory_info", &memory_info);
  m.def("reset_peak", &reset_peak);
  m.def("reset_accumulated", &reset_accumulated);
  m.def("host_bytes", &host_bytes);
  m.def("set_memory_limit", &set_memory_limit);
  m.def("share_devices", &share_devices);
  m.def("set_caching", &set_caching);
  m.def("empty_cache", &empty_cache);
  m.def("set_poisoning", &set_poisoning);
  m.def("pinned_bytes", &pinned_bytes);
  m.def("pinned_reserved", &pinned_reserved);

  m.def("set_race_detection", &set_race_detection);
  m.def("take_races", &take_races);
  m.def("sleep", [](double seconds) { busy(current_stream(current_device()), seconds); });
  m.def("milliseconds_between", &milliseconds_between);
  m.def("synchronize_device", &synchronize_device);
  m.def("set_late", &set_late);
  m.def("is_late", &is_late);
  m.def("copies_in_flight", &copies_in_flight);

  bind_collectives(m);
}

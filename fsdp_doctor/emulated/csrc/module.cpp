// What Python sees. Everything else reaches the device through PyTorch's own registries.
#include <torch/csrc/utils/pybind.h>

#include "agreement.h"
#include "collectives.h"
#include "device.h"
#include "fallback.h"
#include "memory.h"
#include "streams.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emulated;

  m.def("register_device", [] {
    register_hooks();
    register_kernels();
  });
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
    result["limit"] = stats.limit;
    return result;
  });
  m.def("memory_info", &memory_info);
  m.def("reset_peak", &reset_peak);
  m.def("set_memory_limit", &set_memory_limit);
  m.def("pinned_bytes", &pinned_bytes);

  m.def("synchronize_device", &synchronize_device);
  m.def("set_late", &set_late);
  m.def("is_late", &is_late);
  m.def("copies_in_flight", &copies_in_flight);

  m.def("shared_bytes", &shared_bytes);
  m.def("make_backend", &make_backend);
}

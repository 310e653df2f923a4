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
  using namespace pybind11::literals;

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

  m.def("memory_segments", [] {
    py::list segments;
    for (const auto& segment : memory_segments()) {
      py::list blocks;
      auto address = segment.address;
      size_t active = 0, requested = 0;
      for (const auto& part : segment.parts) {
        blocks.append(py::dict(
            "address"_a = address,
            "size"_a = part.nbytes,
            "requested_size"_a = part.requested,
            "state"_a = part.is_free ? "inactive" : "active_allocated",
            "frames"_a = py::list()));
        address += part.nbytes;
        active += part.is_free ? 0 : part.nbytes;
        requested += part.is_free ? 0 : part.requested;
      }
      segments.append(py::dict(
          "device"_a = static_cast<int>(segment.device),
          "address"_a = segment.address,
          "total_size"_a = address - segment.address,
          "allocated_size"_a = active,
          "active_size"_a = active,
          "requested_size"_a = requested,
          "stream"_a = segment.stream,
          "segment_type"_a = segment.is_small ? "small" : "large",
          "segment_pool_id"_a = py::make_tuple(0, 0),
          "is_expandable"_a = false,
          "frames"_a = py::list(),
          "blocks"_a = std::move(blocks)));
    }
    return segments;
  });
  m.def("host_bytes", &host_bytes);
  m.def("set_memory_limit", &set_memory_limit);
  m.def("memory_limit", &memory_limit);
  m.def("share_devices", &share_devices);
  m.def("set_caching", &set_caching);
  m.def("empty_cache", &empty_cache);
  m.def("set_poisoning", &set_poisoning);
  m.def("pinned_bytes", &pinned_bytes);
  m.def("pinned_reserved", &pinned_reserved);

  m.def("set_race_detection", [](bool on) {
    set_race_detection(on);
    watch_host(on);
  });
  m.def("take_races", &take_races);
  m.def("sleep", [](double seconds) { busy(current_stream(current_device()), seconds); });
  m.def("milliseconds_between", &milliseconds_between);
  m.def("synchronize_device", &synchronize_device);
  m.def("set_late", &set_late);
  m.def("is_late", &is_late);
  m.def("copies_in_flight", &copies_in_flight);

  bind_collectives(m);
}

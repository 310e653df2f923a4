// A c10d backend for the emulated devices: gloo, on the devices' own memory.
#pragma once

#include <pybind11/pybind11.h>

namespace emulated {

// shared_bytes(size) -> int: how much memory the ranks of a group share.
// make_backend(host, file, timeout, make) -> Backend
//   host: a backend for CPU tensors over the same ranks, which nobody else uses.
//   file: memory that all ranks have open, shared_bytes(size) zeroes; -1 where they have none in common.
//   make: a backend from a store, a rank, a size and a timeout, for the groups that are split off.
void bind_collectives(pybind11::module_& m);

} // namespace emulated

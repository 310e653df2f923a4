// A c10d backend for the emulated devices: gloo, on the devices' own memory.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace emulated {

// host: a backend for CPU tensors over the same ranks, which nobody else uses.
// file: memory that all ranks have open, shared_bytes(size) zeroes; -1 where they have none in common.
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& host, int file);

} // namespace emulated

// One fallback for every kernel: the CPU's own kernel, on the device's memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <utility>

#include "sparse.h"

namespace emulated {

// The tensors of one call: host tensors on the memory of device tensors, and the way back.
class HostView {
 public:
  // A CPU tensor of the same elements; no copy. A CPU tensor is its own.
  at::Tensor to_host(const at::Tensor& tensor);
  c10::Storage to_host(const c10::Storage& storage);
  // A CPU tensor that the call returned, as a tensor of the device: the argument that it is, a view of
  // the argument that it is a view of, or a new one.
  at::Tensor to_device(const at::Tensor& host, c10::DeviceIndex device);
  // Gives the arguments the sizes, strides and storages that the call gave to their host tensors.
  void write_back(c10::DeviceIndex device);

 private:
  c10::Storage device_storage(const c10::Storage& host, c10::DeviceIndex device);
  Parts device_parts(const at::Tensor& host, c10::DeviceIndex device);

  c10::SmallVector<std::pair<c10::Storage, c10::Storage>, 6> storages_; // device, host
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 6> tensors_; // device, host
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 6> sparse_; // device, host; their parts are among tensors_
};

// Throws where the tensor's memory was freed: a CUDA kernel that reads it dies of it, the host's would
// end the process.
void check_memory(const at::Tensor& tensor);

// The CPU's kernel on the arguments on the stack.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Whether the CPU's operations on pinned memory are compared with what the streams do to it.
void watch_host(bool on);

// Gives kEmulated its kernels.
void register_kernels();

} // namespace emulated

// Copies between the host and the devices, and within a device.
#pragma once

#include <ATen/core/Tensor.h>

namespace emulated {

// aten::copy_ where one of the two is on an emulated device; either may have any dtype and strides.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking);

} // namespace emulated

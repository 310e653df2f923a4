// Operations that CUDA has a kernel for and the CPU has not, put together from those that it has.
#pragma once

#include <torch/library.h>

namespace emulated {

void register_cuda_kernels(torch::Library& kernels);

} // namespace emulated

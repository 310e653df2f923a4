// Attention, by the names that it has on CUDA: what asks for an operation by name finds it (DTensor, the
// policies of activation checkpointing).
#pragma once

#include <torch/library.h>

namespace emulated {

// kernels: at the device's key. composites: at its autograd key, before a tensor subclass is asked.
void register_attention(torch::Library& kernels, torch::Library& composites);

} // namespace emulated

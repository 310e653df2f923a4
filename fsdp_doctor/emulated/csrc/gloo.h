// Collectives of a group of gloo on tensors of the device. For CUDA, gloo takes them by way of the host; other devices
// it refuses.
#pragma once

namespace emulated {

void register_gloo();

} // namespace emulated

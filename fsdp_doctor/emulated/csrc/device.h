// What PyTorch asks of an accelerator: how many devices, which is current, their random numbers.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace emulated {

// The process uses the device from here on. Throws in a process that was forked from one that did: what
// CUDA cannot take over, this device does not either.
void initialize();
bool is_initialized();
bool is_in_bad_fork();

void set_device_count(c10::DeviceIndex count);
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
// Throws for a device that does not exist.
void check_device(c10::DeviceIndex device);
// Returns the device that was current before. Throws for a device that does not exist.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);

// The generator that an operation uses when it is given none.
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
// A CPU generator for one operation, from the seed and the offset of the device's; the offset moves on.
at::Generator draw(const at::Generator& generator);

// Registers the hooks. The guard and the allocators register themselves when the library is loaded.
void register_hooks();

} // namespace emulated

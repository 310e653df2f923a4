// What other processes have in use on the same devices: each says its own in a file that all of them map.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace emulated {

// From now on the devices are those of every process that shares this file; it is made where it is not there. Of a
// process that has ended nothing is counted any more.
void share_devices(const std::string& path);
// Says what this process has in use. Without a file nobody hears it.
void say_in_use(c10::DeviceIndex device, int64_t nbytes);
// Bytes that the other processes have in use, 0 without a file.
int64_t in_use_by_others(c10::DeviceIndex device);

} // namespace emulated

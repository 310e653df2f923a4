// Memory of the emulated devices: it lies in host memory and is counted. Pinned host memory is told apart.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "caching.h"

namespace emulated {

constexpr c10::DeviceType kEmulated = c10::DeviceType::PrivateUse1;

// What lies behind a DataPtr of a device or of pinned memory. A copy in flight holds its blocks, so
// that they outlive a tensor that is freed meanwhile, as the caching allocators of CUDA see to.
struct Block : c10::intrusive_ptr_target {
  c10::DataPtr memory;
  size_t nbytes = 0;
  c10::Device device = c10::Device(c10::kCPU);
  c10::StreamId stream = 0; // that it was allocated on, and goes back to
  std::vector<c10::StreamId> recorded{}; // others that use it, by record_stream
  CachingModel::Block* cached = nullptr;
};

using BlockPtr = c10::intrusive_ptr<Block>;

// The caching allocator's segments and their blocks; without it every tensor is a segment of its own.
std::vector<Segment> memory_segments();
// What a device has without a limit.
int64_t host_bytes();
// Bytes that every device has; 0: no limit.
void set_memory_limit(int64_t nbytes);
int64_t memory_limit();
// Whether memory is reserved in segments that fragment, as by CUDA's caching allocator. Only while nothing is allocated.
void set_caching(bool on);
void empty_cache();
// Whether what is freed holds not-a-number from then on, also for the copies that still read it on a stream that
// the memory's own does not wait for.
void set_poisoning(bool on);
void record_stream(const c10::DataPtr& data, c10::StreamId stream);
int64_t pinned_bytes();

// Bytes that CUDA's allocator of pinned memory would have taken for them, and kept of earlier ones.
int64_t pinned_reserved();

// Memory of the host, to become a device's. Throws OutOfMemoryError where there is not so much.
c10::DataPtr host_memory(size_t nbytes, c10::DeviceIndex device);
[[noreturn]] void throw_out_of_memory(size_t nbytes, c10::DeviceIndex device);
// Host memory becomes memory of a device: counted from now until the result is freed. Throws
// OutOfMemoryError where the device's limit does not allow it.
c10::DataPtr on_device(c10::DataPtr host, size_t nbytes, c10::DeviceIndex device);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// The block behind a device's DataPtr; null for a pointer that is not from on_device.
BlockPtr device_block(const c10::DataPtr& data);
// The pinned block that holds the address; null where the memory is pageable.
BlockPtr pinned_block(const void* address);

} // namespace emulated

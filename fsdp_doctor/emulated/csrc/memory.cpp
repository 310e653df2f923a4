#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "streams.h"

namespace emulated {
namespace {

// CUDA's caching allocator counts in multiples of it, so the same tensors give the same figures.
constexpr size_t kGranularity = 512;
// What new pinned memory holds: not-a-number in every floating dtype.
constexpr int kOldByte = 0xff;

std::mutex mutex;
std::array<MemoryStats, kMaxDevices> stats;
int64_t limit = 0;

int64_t rounded(size_t nbytes) {
  return static_cast<int64_t>((nbytes + kGranularity - 1) / kGranularity * kGranularity);
}

std::string readable(int64_t nbytes) {
  constexpr std::array<const char*, 4> kUnits{"bytes", "KiB", "MiB", "GiB"};
  auto value = static_cast<double>(nbytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    unit += 1;
  }
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return text.data();
}

void take(size_t nbytes, c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& own = stats.at(device);
  const auto size = rounded(nbytes);
  if (limit > 0 && own.allocated + size > limit) {
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        false,
        "emulated out of memory. Tried to allocate ",
        readable(size),
        ". Device ",
        static_cast<int>(device),
        " has a total capacity of ",
        readable(limit),
        " of which ",
        readable(limit - own.allocated),
        " is free.");
  }
  own.allocated += size;
  own.allocations += 1;
  own.peak = std::max(own.peak, own.allocated);
}

void give_back(const Block& block) {
  std::lock_guard<std::mutex> lock(mutex);
  stats.at(block.device.index()).allocated -= rounded(block.nbytes);
}

void free_on_device(void* context) {
  auto block = BlockPtr::reclaim(static_cast<Block*>(context));
  give_back(*block);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::impl::VirtualGuardImpl guard(kEmulated);
    return on_device(c10::GetCPUAllocator()->allocate(nbytes), nbytes, guard.getDevice().index());
  }

  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }

  bool initialized() override {
    return true;
  }

  // Nothing is cached: what a tensor gives back is free at once.
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto own = memory_stats(device);
    c10::CachingDeviceAllocator::DeviceStats result;
    for (auto* bytes : {&result.allocated_bytes, &result.reserved_bytes, &result.active_bytes}) {
      auto& all = bytes->at(static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE));
      all.current = own.allocated;
      all.peak = own.peak;
    }
    return result;
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    reset_peak(device);
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return memory_info(device);
  }
};

// Where pinned blocks lie, by their first address.
std::map<uintptr_t, Block*> pinned;
int64_t pinned_now = 0;

void free_pinned(void* context) {
  auto block = BlockPtr::reclaim(static_cast<Block*>(context));
  std::lock_guard<std::mutex> lock(mutex);
  pinned.erase(reinterpret_cast<uintptr_t>(block->memory.get()));
  pinned_now -= static_cast<int64_t>(block->nbytes);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    auto block = c10::make_intrusive<Block>();
    // One byte at least: an empty pinned tensor is pinned too, and must have an address of its own.
    block->memory = c10::GetCPUAllocator()->allocate(std::max<size_t>(nbytes, 1));
    block->nbytes = nbytes;
    void* data = block->memory.get();
    if (is_late()) {
      // Not what a tensor that was freed left there: those may be the very bytes that are still to come.
      std::memset(data, kOldByte, nbytes);
    }
    {
      std::lock_guard<std::mutex> lock(mutex);
      pinned[reinterpret_cast<uintptr_t>(data)] = block.get();
      pinned_now += static_cast<int64_t>(nbytes);
    }
    return {data, block.release(), &free_pinned, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }

  // A copy in flight holds its block: there is no event to record, and nothing is cached.
  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }
  void empty_cache() override {}
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  at::HostStats get_stats() override {
    at::HostStats stats;
    stats.allocated_bytes.current = pinned_bytes();
    return stats;
  }
};

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;
REGISTER_ALLOCATOR(kEmulated, &the_device_allocator);
REGISTER_HOST_ALLOCATOR(kEmulated, &the_pinned_allocator);

} // namespace

MemoryStats memory_stats(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex);
  auto result = stats.at(device);
  result.limit = limit;
  return result;
}

void reset_peak(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex);
  stats.at(device).peak = stats.at(device).allocated;
}

void set_memory_limit(int64_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex);
  limit = nbytes;
}

int64_t pinned_bytes() {
  std::lock_guard<std::mutex> lock(mutex);
  return pinned_now;
}

std::pair<size_t, size_t> memory_info(c10::DeviceIndex device) {
  const auto own = memory_stats(device);
  const auto total = own.limit > 0 ? own.limit : sysconf(_SC_PAGESIZE) * sysconf(_SC_PHYS_PAGES);
  return {static_cast<size_t>(std::max<int64_t>(0, total - own.allocated)), static_cast<size_t>(total)};
}

c10::DataPtr on_device(c10::DataPtr host, size_t nbytes, c10::DeviceIndex device) {
  take(nbytes, device);
  auto block = c10::make_intrusive<Block>();
  block->memory = std::move(host);
  block->nbytes = nbytes;
  block->device = c10::Device(kEmulated, device);
  void* data = block->memory.get();
  return {data, block.release(), &free_on_device, c10::Device(kEmulated, device)};
}

c10::Allocator* device_allocator() {
  return &the_device_allocator;
}

c10::Allocator* pinned_allocator() {
  return &the_pinned_allocator;
}

BlockPtr device_block(const c10::DataPtr& data) {
  if (data.get_deleter() != &free_on_device) {
    return {};
  }
  return BlockPtr::reclaim_copy(static_cast<Block*>(data.get_context()));
}

BlockPtr pinned_block(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(mutex);
  auto after = pinned.upper_bound(wanted);
  if (after == pinned.begin()) {
    return {};
  }
  Block* block = std::prev(after)->second;
  const auto end = std::prev(after)->first + std::max<size_t>(block->nbytes, 1);
  return wanted < end ? BlockPtr::reclaim_copy(block) : BlockPtr();
}

} // namespace emulated

#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "device.h"
#include "neighbours.h"
#include "races.h"
#include "streams.h"

namespace emulated {
namespace {

// CUDA's caching allocator counts in multiples of it, so the same tensors give the same figures.
constexpr size_t kGranularity = 512;
// What new pinned memory holds: not-a-number in every floating dtype.
constexpr int kOldByte = 0xff;

std::mutex mutex;
std::array<MemoryStats, kMaxDevices> stats;
std::array<std::optional<CachingModel>, kMaxDevices> models; // while memory is reserved in segments
std::set<const Block*> live; // while it is not
int64_t limit = 0;
std::atomic<bool> poisoning{false};

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

[[noreturn]] void refuse(int64_t size, c10::DeviceIndex device, const MemoryStats& own) {
  const auto total = limit > 0 ? limit : host_bytes();
  const auto allocated = own.allocated_bytes[kAggregate].current, in_use = own.reserved_bytes[kAggregate].current;
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      false,
      "emulated out of memory. Tried to allocate ",
      readable(size),
      ". Device ",
      static_cast<int>(device),
      " has a total capacity of ",
      readable(total),
      " of which ",
      readable(std::max<int64_t>(0, total - in_use - in_use_by_others(device))),
      " is free. Of the allocated memory ",
      readable(allocated),
      " is allocated by PyTorch, and ",
      readable(in_use - allocated),
      " is reserved by PyTorch but unallocated.");
}

// One block more or less. Where nothing is cached it is reserved for as long as it is allocated.
void count(MemoryStats& own, const Block& block, int64_t sign) {
  const auto size = rounded(block.nbytes);
  const bool is_small = size <= kSmallSize;
  for (auto* number : {&own.allocation, &own.active}) {
    add(*number, is_small, sign);
  }
  for (auto* bytes : {&own.allocated_bytes, &own.active_bytes}) {
    add(*bytes, is_small, sign * size);
  }
  add(own.requested_bytes, is_small, sign * static_cast<int64_t>(block.nbytes));
  if (block.cached == nullptr && size > 0) {
    add(own.segment, is_small, sign);
    add(own.reserved_bytes, is_small, sign * size);
    sign > 0 ? static_cast<void>(live.insert(&block)) : static_cast<void>(live.erase(&block));
  }
  say_in_use(block.device.index(), own.reserved_bytes[kAggregate].current);
}

void take(Block& block) {
  initialize();
  std::lock_guard<std::mutex> lock(mutex);
  const auto device = block.device.index();
  auto& own = stats.at(device);
  auto& model = models.at(device);
  const auto size = rounded(block.nbytes);
  const auto most = (limit > 0 ? limit : host_bytes()) - in_use_by_others(device);
  if (model && size > 0) {
    block.cached = model->allocate(size, block.stream, most);
  }
  if (model ? size > 0 && block.cached == nullptr : own.allocated_bytes[kAggregate].current + size > most) {
    own.num_ooms += 1;
    refuse(size, device, own);
  }
  count(own, block, 1);
}

void give_back(const Block& block) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto device = block.device.index();
  count(stats.at(device), block, -1);
  if (block.cached != nullptr) {
    models.at(device)->free(block.cached);
  }
}

template <typename Change>
void each_counter(MemoryStats& own, const Change& change) {
  for (auto* counter :
       {&own.allocation, &own.segment, &own.active, &own.inactive_split, &own.allocated_bytes, &own.reserved_bytes,
        &own.active_bytes, &own.inactive_split_bytes, &own.requested_bytes}) {
    std::for_each(counter->begin(), counter->end(), change);
  }
}

void free_on_device(void* context) {
  auto block = BlockPtr::reclaim(static_cast<Block*>(context));
  const c10::Stream owner(c10::Stream::UNSAFE, block->device, block->stream);
  release(block->memory.get(), block->nbytes, owner, block->recorded);
  if (poisoning && block->memory) {
    poison_reads(block->memory.get(), block->nbytes, owner, block->recorded);
    std::memset(block->memory.get(), kOldByte, block->nbytes);
  }
  give_back(*block);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::impl::VirtualGuardImpl guard(kEmulated);
    return on_device(host_memory(nbytes, guard.getDevice().index()), nbytes, guard.getDevice().index());
  }

  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    empty_cache();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data, stream.id());
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    auto& own = stats.at(device);
    each_counter(own, [](auto& counter) { counter.reset_accumulated(); });
    own.num_alloc_retries = own.num_ooms = own.num_device_alloc = own.num_device_free = 0;
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    return stats.at(device);
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    each_counter(stats.at(device), [](auto& counter) { counter.reset_peak(); });
  }

  // Free and total bytes. Without a limit the total is what this host has.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    const auto total = limit > 0 ? limit : host_bytes();
    const auto in_use = stats.at(device).reserved_bytes[kAggregate].current + in_use_by_others(device);
    return {static_cast<size_t>(std::max<int64_t>(0, total - in_use)), static_cast<size_t>(total)};
  }
};

// Where pinned blocks lie, by their first address.
std::map<uintptr_t, Block*> pinned;
int64_t pinned_now = 0;

// What CUDA's caching allocator of pinned memory would have taken: blocks of a power of two, which it keeps for the
// next tensor of that size. Here nothing is kept: memory that is used again would hide an early read of it.
struct PinnedBin {
  int64_t live = 0;
  int64_t taken = 0;
};
std::array<PinnedBin, 64> pinned_bins;

PinnedBin& pinned_bin(size_t nbytes) {
  size_t exponent = 0;
  while ((size_t{1} << exponent) < nbytes) {
    ++exponent;
  }
  return pinned_bins.at(exponent);
}

void free_pinned(void* context) {
  auto block = BlockPtr::reclaim(static_cast<Block*>(context));
  forget(block->memory.get());
  std::lock_guard<std::mutex> lock(mutex);
  pinned.erase(reinterpret_cast<uintptr_t>(block->memory.get()));
  pinned_now -= static_cast<int64_t>(block->nbytes);
  if (block->nbytes > 0) {
    --pinned_bin(block->nbytes).live;
  }
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
      if (nbytes > 0) {
        auto& bin = pinned_bin(nbytes);
        bin.taken = std::max(bin.taken, ++bin.live);
      }
    }
    return {data, block.release(), &free_pinned, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }

  // A copy in flight holds its block: there is no event to record.
  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }
  void empty_cache() override {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& bin : pinned_bins) {
      bin.taken = bin.live;
    }
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  at::HostStats get_stats() override {
    at::HostStats stats;
    stats.allocated_bytes.current = pinned_reserved();
    return stats;
  }
};

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;
REGISTER_ALLOCATOR(kEmulated, &the_device_allocator);
REGISTER_HOST_ALLOCATOR(kEmulated, &the_pinned_allocator);

} // namespace

std::vector<Segment> memory_segments() {
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<Segment> all;
  for (const auto* block : live) {
    const auto nbytes = rounded(block->nbytes);
    all.push_back(
        {block->device.index(),
         reinterpret_cast<size_t>(block->memory.get()),
         block->stream,
         nbytes <= kSmallSize,
         {{static_cast<size_t>(nbytes), block->nbytes, /*is_free=*/false}}});
  }
  for (size_t device = 0; device < models.size(); ++device) {
    if (const auto& model = models.at(device)) {
      const auto segments = model->segments(static_cast<c10::DeviceIndex>(device));
      all.insert(all.end(), segments.begin(), segments.end());
    }
  }
  return all;
}

int64_t host_bytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE) * sysconf(_SC_PHYS_PAGES);
  return bytes;
}

void set_memory_limit(int64_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex);
  limit = nbytes;
}

int64_t memory_limit() {
  std::lock_guard<std::mutex> lock(mutex);
  return limit;
}

void set_caching(bool on) {
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t device = 0; device < models.size(); ++device) {
    auto& model = models.at(device);
    TORCH_CHECK(
        on == model.has_value() || stats.at(device).allocated_bytes[kAggregate].current == 0,
        "the allocator cannot be changed while there are tensors");
  }
  for (size_t device = 0; device < models.size(); ++device) {
    auto& model = models.at(device);
    if (on && !model) {
      model.emplace(stats.at(device));
    } else if (!on && model) {
      model->empty();
      model.reset();
    }
  }
}

void empty_cache() {
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t device = 0; device < models.size(); ++device) {
    if (auto& model = models.at(device)) {
      model->empty();
      say_in_use(static_cast<c10::DeviceIndex>(device), stats.at(device).reserved_bytes[kAggregate].current);
    }
  }
}

void set_poisoning(bool on) {
  poisoning = on;
}

void record_stream(const c10::DataPtr& data, c10::StreamId stream) {
  if (const auto block = device_block(data)) {
    std::lock_guard<std::mutex> lock(mutex);
    block->recorded.push_back(stream);
  }
}

int64_t pinned_bytes() {
  std::lock_guard<std::mutex> lock(mutex);
  return pinned_now;
}

int64_t pinned_reserved() {
  std::lock_guard<std::mutex> lock(mutex);
  int64_t sum = 0;
  for (size_t exponent = 0; exponent < pinned_bins.size(); ++exponent) {
    sum += pinned_bins[exponent].taken << exponent;
  }
  return sum;
}

void throw_out_of_memory(size_t nbytes, c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(mutex);
  stats.at(device).num_ooms += 1;
  refuse(rounded(nbytes), device, stats.at(device));
}

c10::DataPtr host_memory(size_t nbytes, c10::DeviceIndex device) {
  try {
    return c10::GetCPUAllocator()->allocate(nbytes);
  } catch (const c10::Error&) {
    throw_out_of_memory(nbytes, device);
  }
}

c10::DataPtr on_device(c10::DataPtr host, size_t nbytes, c10::DeviceIndex device) {
  auto block = c10::make_intrusive<Block>();
  block->memory = std::move(host);
  block->nbytes = nbytes;
  block->device = c10::Device(kEmulated, device);
  block->stream = current_stream(device).id();
  take(*block);
  reuse(nbytes, current_stream(device));
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

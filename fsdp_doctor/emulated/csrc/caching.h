// What CUDA's caching allocator would have reserved: its segments and blocks, without their memory. Off unless asked for.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <vector>

namespace emulated {

using MemoryStats = c10::CachingDeviceAllocator::DeviceStats;

// Memory that the caching allocator has reserved at once, and the blocks that it lies in.
struct Segment {
  struct Part {
    size_t nbytes;
    size_t requested;
    bool is_free;
  };
  c10::DeviceIndex device;
  size_t address;
  c10::StreamId stream;
  bool is_small;
  std::vector<Part> parts;
};

constexpr auto kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

// The largest of what comes from segments of small blocks.
constexpr int64_t kSmallSize = 1024 * 1024;
// More of a counter, or less, in all and in the pool of small or of large blocks.
void add(c10::CachingAllocator::StatArray& counter, bool is_small, int64_t amount);

// One device. It takes no lock; memory.cpp's is held.
class CachingModel {
 public:
  struct Block;

  explicit CachingModel(MemoryStats& stats) : stats_(stats) {}

  // Null where more than `limit` bytes would be reserved, with what is free given back.
  Block* allocate(int64_t nbytes, c10::StreamId stream, int64_t limit);
  void free(Block* block);
  // Gives back the segments that are free as a whole.
  void empty();
  // There is no memory, so an address is what the segments before this one came to.
  std::vector<Segment> segments(c10::DeviceIndex device) const;

 private:
  using Pool = std::tuple<c10::StreamId, bool>; // bool: of small blocks
  struct BySize {
    bool operator()(const Block* one, const Block* other) const;
  };

  Block* reserve(Pool pool, int64_t nbytes, int64_t limit);
  void cut(Block* block, int64_t nbytes);
  void join(Block* block, Block* next);
  void insert(Block* block);
  void remove(Block* block);
  void count_segment(const Block& block, int64_t sign);
  void count_split(const Block& block, int64_t sign);

  MemoryStats& stats_;
  std::map<size_t, Block*> segments_; // the first block, by address
  std::map<Pool, std::set<Block*, BySize>> free_;
  uint64_t made_ = 0;
  size_t next_address_ = 0;
};

} // namespace emulated

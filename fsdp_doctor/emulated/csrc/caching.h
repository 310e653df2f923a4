// What CUDA's caching allocator would have reserved: its segments and blocks, without their memory. Off unless asked for.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <set>
#include <tuple>

namespace emulated {

// One device. It takes no lock; memory.cpp's is held.
class CachingModel {
 public:
  struct Block;

  // Null where more than `limit` bytes would be reserved, with what is free given back.
  Block* allocate(int64_t nbytes, c10::StreamId stream, int64_t limit);
  void free(Block* block);
  // Gives back the segments that are free as a whole.
  void empty();

  int64_t reserved = 0; // bytes in segments
  int64_t peak = 0;
  int64_t segments = 0;
  int64_t retries = 0; // allocations that had to give back what was free first
  int64_t split = 0; // free bytes in segments that are in use: they can be given back to nobody else

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

  std::map<Pool, std::set<Block*, BySize>> free_;
  uint64_t made_ = 0;
};

} // namespace emulated

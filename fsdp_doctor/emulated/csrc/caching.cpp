#include "caching.h"

#include <algorithm>

namespace emulated {
namespace {

// The sizes of c10/cuda/CUDACachingAllocator.h.
constexpr int64_t kMiB = 1024 * 1024;
constexpr int64_t kSmallSegment = 2 * kMiB;
constexpr int64_t kLargeSegment = 20 * kMiB;
constexpr int64_t kOwnSegment = 10 * kMiB; // from here on a block has a segment of its own
constexpr int64_t kRound = 2 * kMiB;
constexpr int64_t kSmallestRest = 512;

int64_t segment_bytes(int64_t nbytes) {
  if (nbytes <= kSmallSize) {
    return kSmallSegment;
  }
  return nbytes < kOwnSegment ? kLargeSegment : (nbytes + kRound - 1) / kRound * kRound;
}

} // namespace

void add(c10::CachingAllocator::StatArray& counter, bool is_small, int64_t amount) {
  using c10::CachingAllocator::StatType;
  for (const auto kind : {StatType::AGGREGATE, is_small ? StatType::SMALL_POOL : StatType::LARGE_POOL}) {
    auto& one = counter.at(static_cast<size_t>(kind));
    amount > 0 ? one.increase(amount) : one.decrease(-amount);
  }
}

struct CachingModel::Block {
  Pool pool;
  int64_t nbytes;
  uint64_t number; // in the order of their making, where CUDA goes by address
  size_t address;
  bool is_free = false;
  Block* before = nullptr; // in its segment
  Block* next = nullptr;

  bool is_whole() const {
    return before == nullptr && next == nullptr;
  }
};

bool CachingModel::BySize::operator()(const Block* one, const Block* other) const {
  return std::tie(one->nbytes, one->number) < std::tie(other->nbytes, other->number);
}

CachingModel::Block* CachingModel::allocate(int64_t nbytes, c10::StreamId stream, int64_t limit) {
  nbytes = std::max<int64_t>(nbytes, kSmallestRest);
  const Pool pool{stream, nbytes <= kSmallSize};
  Block wanted{pool, nbytes, 0, 0};
  const auto best = free_[pool].lower_bound(&wanted);
  Block* block = best == free_[pool].end() ? reserve(pool, segment_bytes(nbytes), limit) : *best;
  if (block != nullptr) {
    remove(block);
    cut(block, nbytes);
  }
  return block;
}

CachingModel::Block* CachingModel::reserve(Pool pool, int64_t nbytes, int64_t limit) {
  const auto& reserved = stats_.reserved_bytes[kAggregate].current;
  if (reserved + nbytes > limit) {
    stats_.num_alloc_retries += 1;
    empty();
  }
  if (reserved + nbytes > limit) {
    return nullptr;
  }
  auto* block = new Block{pool, nbytes, ++made_, next_address_};
  next_address_ += nbytes;
  segments_[block->address] = block;
  count_segment(*block, 1);
  insert(block);
  return block;
}

void CachingModel::cut(Block* block, int64_t nbytes) {
  const auto rest = block->nbytes - nbytes;
  const bool is_small = std::get<1>(block->pool);
  if (is_small ? rest < kSmallestRest : rest <= kSmallSize) {
    return;
  }
  auto* behind = new Block{block->pool, rest, ++made_, block->address + nbytes, false, block, block->next};
  if (behind->next != nullptr) {
    behind->next->before = behind;
  }
  block->next = behind;
  block->nbytes = nbytes;
  insert(behind);
}

void CachingModel::free(Block* block) {
  if (auto* next = block->next; next != nullptr && next->is_free) {
    remove(next);
    join(block, next);
  }
  if (auto* before = block->before; before != nullptr && before->is_free) {
    remove(before);
    join(before, block);
    block = before;
  }
  insert(block);
}

void CachingModel::join(Block* block, Block* next) {
  block->nbytes += next->nbytes;
  block->next = next->next;
  if (block->next != nullptr) {
    block->next->before = block;
  }
  delete next;
}

void CachingModel::insert(Block* block) {
  block->is_free = true;
  free_[block->pool].insert(block);
  count_split(*block, 1);
}

void CachingModel::remove(Block* block) {
  count_split(*block, -1);
  free_[block->pool].erase(block);
  block->is_free = false;
}

void CachingModel::empty() {
  for (auto& [_, blocks] : free_) {
    for (auto one = blocks.begin(); one != blocks.end();) {
      Block* block = *one++;
      if (block->is_whole()) {
        remove(block);
        count_segment(*block, -1);
        segments_.erase(block->address);
        delete block;
      }
    }
  }
}

void CachingModel::count_segment(const Block& block, int64_t sign) {
  const bool is_small = std::get<1>(block.pool);
  add(stats_.segment, is_small, sign);
  add(stats_.reserved_bytes, is_small, sign * block.nbytes);
  (sign > 0 ? stats_.num_device_alloc : stats_.num_device_free) += 1;
}

// Free, in a segment that is in use: it can be given back to nobody else.
void CachingModel::count_split(const Block& block, int64_t sign) {
  if (!block.is_whole()) {
    add(stats_.inactive_split, std::get<1>(block.pool), sign);
    add(stats_.inactive_split_bytes, std::get<1>(block.pool), sign * block.nbytes);
  }
}

std::vector<Segment> CachingModel::segments(c10::DeviceIndex device) const {
  std::vector<Segment> all;
  for (const auto& [address, first] : segments_) {
    all.push_back({device, address, std::get<0>(first->pool), std::get<1>(first->pool), {}});
    for (const auto* block = first; block != nullptr; block = block->next) {
      const size_t nbytes = block->nbytes;
      all.back().parts.push_back({nbytes, nbytes, block->is_free});
    }
  }
  return all;
}

} // namespace emulated

#include "caching.h"

#include <algorithm>

namespace emulated {
namespace {

// The sizes of c10/cuda/CUDACachingAllocator.h.
constexpr int64_t kMiB = 1024 * 1024;
constexpr int64_t kSmallSize = kMiB; // the largest of the small blocks
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

struct CachingModel::Block {
  Pool pool;
  int64_t nbytes;
  uint64_t number; // in the order of their making, where CUDA goes by address
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
  Block wanted{pool, nbytes, 0};
  const auto best = free_[pool].lower_bound(&wanted);
  Block* block = best == free_[pool].end() ? reserve(pool, segment_bytes(nbytes), limit) : *best;
  if (block != nullptr) {
    remove(block);
    cut(block, nbytes);
  }
  return block;
}

CachingModel::Block* CachingModel::reserve(Pool pool, int64_t nbytes, int64_t limit) {
  if (reserved + nbytes > limit) {
    retries += 1;
    empty();
  }
  if (reserved + nbytes > limit) {
    return nullptr;
  }
  reserved += nbytes;
  peak = std::max(peak, reserved);
  segments += 1;
  auto* block = new Block{pool, nbytes, ++made_};
  insert(block);
  return block;
}

void CachingModel::cut(Block* block, int64_t nbytes) {
  const auto rest = block->nbytes - nbytes;
  const bool is_small = std::get<1>(block->pool);
  if (is_small ? rest < kSmallestRest : rest <= kSmallSize) {
    return;
  }
  auto* behind = new Block{block->pool, rest, ++made_, false, block, block->next};
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
  split += block->is_whole() ? 0 : block->nbytes;
}

void CachingModel::remove(Block* block) {
  split -= block->is_whole() ? 0 : block->nbytes;
  free_[block->pool].erase(block);
  block->is_free = false;
}

void CachingModel::empty() {
  for (auto& [_, blocks] : free_) {
    for (auto one = blocks.begin(); one != blocks.end();) {
      Block* block = *one++;
      if (block->is_whole()) {
        remove(block);
        reserved -= block->nbytes;
        segments -= 1;
        delete block;
      }
    }
  }
}

} // namespace emulated

// Whether all ranks of a group are about to do the same. NCCL does not ask, and stands still where
// they are not; gloo would end a process. So here the ranks ask first, and stand still if not.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

namespace emulated {

// What every rank must say alike of a collective.
struct Header {
  c10d::OpType type;
  int64_t nbytes; // of what all ranks hold alike; 0 where ranks may differ
  int64_t root = 0;
  int64_t reduce_op = 0;

  std::array<int64_t, 4> words() const {
    return {static_cast<int64_t>(type), nbytes, root, reduce_op};
  }
};

enum class Answer { not_yet, same, different };

// One question after the other: ask, then look until there is an answer.
class Agreement {
 public:
  virtual ~Agreement() = default;
  virtual void ask(const Header& header) = 0;
  // Does not wait.
  virtual Answer look() = 0;
  // Waits for some time.
  virtual Answer wait() = 0;
};

// How much memory the ranks of a group share.
size_t shared_bytes(int size);
// Over memory that all ranks of the group map; a wakeup is cheaper than a message.
std::unique_ptr<Agreement> agree_over_memory(int file, int rank, int size);
// For ranks on several hosts.
std::unique_ptr<Agreement> agree_over_messages(const c10::intrusive_ptr<c10d::Backend>& host);

} // namespace emulated

// Which accesses of the same memory nothing orders: a clock of what each stream has seen of the others, after which two
// kernels on streams that did not wait for one another are told. Off unless asked for.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace emulated {

// Of each stream, how many of its kernels are known to have run.
using Clock = std::map<std::pair<c10::DeviceIndex, c10::StreamId>, uint64_t>;

// The bytes of a tensor: runs that lie apart, as the columns of a matrix do.
struct Access {
  const void* base; // of the storage, or of the pinned block
  size_t begin; // bytes from there
  size_t end;
  bool writes;
  size_t run; // bytes that lie together
  c10::SmallVector<std::pair<size_t, size_t>, 2> outer; // how many, how many bytes apart; the widest apart first
};

void set_race_detection(bool on);
bool detects_races();
// What was found since the last call, a sentence for each pair of kernels.
std::vector<std::string> take_races();

Access access_of(const at::Tensor& tensor, bool writes);
// Of a dense tensor of the host; nothing where its memory is not pinned.
std::optional<Access> pinned_access_of(const at::Tensor& tensor, bool writes);
// The host makes these accesses now.
void touch_on_host(const std::string& kernel, const std::vector<Access>& accesses);
// Pinned memory is freed. CUDA gives it out again when the copies are through.
void forget(const void* base);
// A kernel of the stream is about to make these accesses.
void launch(const std::string& kernel, c10::Stream stream, const std::vector<Access>& accesses);
// What the stream has done and seen until now; null while nothing is detected.
std::shared_ptr<const Clock> clock_of(c10::Stream stream);
// What follows on the stream, or on every stream, comes after what the clock has.
void follow(c10::Stream stream, const Clock& clock);
void host_follows(const Clock& clock);
void host_follows(c10::Stream stream);
void host_follows(c10::DeviceIndex device);

// A storage's memory goes back to the stream that it was allocated on; the streams in `recorded` are waited for.
void release(const void* base, size_t nbytes, c10::Stream owner, const std::vector<c10::StreamId>& recorded);
// The stream is about to get memory, which may be any that went back to it and is large enough.
void reuse(size_t nbytes, c10::Stream owner);

} // namespace emulated

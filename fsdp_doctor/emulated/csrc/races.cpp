#include "races.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <unordered_map>

#include "memory.h"

namespace emulated {
namespace {

using Name = Clock::key_type;

struct Record {
  Name stream;
  uint64_t time;
  Access access;
  std::string kernel;
};

std::atomic<bool> on{false};
std::mutex mutex;
std::map<Name, Clock> clocks;
Clock host;
std::unordered_map<const void*, std::vector<Record>> records; // by storage
std::set<std::string> found;
// By the stream that the memory goes back to: uses of it that the stream may not have seen yet.
std::map<Name, std::vector<std::pair<size_t, Record>>> freed;

Name name_of(c10::Stream stream) {
  return {stream.device_index(), stream.id()};
}

void merge(Clock& clock, const Clock& other) {
  for (const auto& [stream, time] : other) {
    clock[stream] = std::max(clock[stream], time);
  }
}

bool has_seen(const Clock& clock, const Record& record) {
  const auto seen = clock.find(record.stream);
  return seen != clock.end() && seen->second >= record.time;
}

// How many bytes there are from the first to the last of a part of the access: what is below a dimension.
size_t extent(const Access& access, size_t depth) {
  size_t nbytes = access.run;
  for (; depth < access.outer.size(); ++depth) {
    nbytes += (access.outer[depth].first - 1) * access.outer[depth].second;
  }
  return nbytes;
}

// Whether the part of the access that begins at `at` has a byte in the range. A range ends at most two of the runs that it
// meets, so few are looked at.
bool meets(const Access& access, size_t depth, size_t at, size_t begin, size_t end) {
  const auto last = at + extent(access, depth);
  if (end <= at || last <= begin) {
    return false;
  }
  if (depth == access.outer.size() || (begin <= at && last <= end)) {
    return true;
  }
  const auto [count, stride] = access.outer[depth];
  const auto inner = extent(access, depth + 1);
  const auto first = begin < at + inner ? 0 : (begin - at - inner) / stride + 1;
  for (auto i = first; i < count && at + i * stride < end; ++i) {
    if (meets(access, depth + 1, at + i * stride, begin, end)) {
      return true;
    }
  }
  return false;
}

bool share_bytes(const Access& one, size_t depth, size_t at, const Access& other) {
  if (!meets(other, 0, other.begin, at, at + extent(one, depth))) {
    return false;
  }
  if (depth == one.outer.size()) {
    return true;
  }
  const auto [count, stride] = one.outer[depth];
  for (size_t i = 0; i < count; ++i) {
    if (share_bytes(one, depth + 1, at + i * stride, other)) {
      return true;
    }
  }
  return false;
}

bool overlap(const Access& one, const Access& other) {
  return one.outer.size() <= other.outer.size() ? share_bytes(one, 0, one.begin, other)
                                                : share_bytes(other, 0, other.begin, one);
}

bool conflict(const Access& access, const Record& before, const Clock& clock) {
  return (access.writes || before.access.writes) && !has_seen(clock, before) && overlap(access, before.access);
}

std::string described(const Name& stream) {
  return "stream " + std::to_string(stream.second) + " of emulated:" + std::to_string(static_cast<int>(stream.first));
}

std::string race(const std::string& kernel, const std::string& where, bool writes, const Record& before) {
  return kernel + " on " + where + (writes ? " writes" : " reads") + " what " + before.kernel + " on " +
      described(before.stream) + (before.access.writes ? " writes" : " reads");
}

// No longer needed: what a later access that is ordered after it stands for.
bool replaces(const Access& access, const Name& stream, const Record& before) {
  const auto& old = before.access;
  const bool covers = access.outer.empty()
      ? access.begin <= old.begin && old.end <= access.end
      : access.begin == old.begin && access.run == old.run && access.outer == old.outer;
  return covers && (access.writes || (!before.access.writes && before.stream == stream));
}

} // namespace

void set_race_detection(bool value) {
  std::lock_guard<std::mutex> lock(mutex);
  on = value;
  clocks.clear();
  host.clear();
  records.clear();
  freed.clear();
  found.clear();
}

bool detects_races() {
  return on;
}

std::vector<std::string> take_races() {
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<std::string> sentences(found.begin(), found.end());
  found.clear();
  return sentences;
}

Access access_of(const at::Tensor& tensor, bool writes) {
  const size_t size = tensor.element_size();
  const auto begin = static_cast<size_t>(tensor.storage_offset()) * size;
  std::vector<std::pair<size_t, size_t>> dims; // bytes apart, how many
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) > 0) {
      dims.emplace_back(tensor.stride(dim) * size, tensor.size(dim));
    }
  }
  std::sort(dims.begin(), dims.end());
  Access access{tensor.storage().data(), begin, begin, writes, size, {}};
  for (const auto& [stride, count] : dims) {
    if (access.outer.empty() && stride <= access.run) {
      access.run += stride * (count - 1);
    } else {
      access.outer.insert(access.outer.begin(), {count, stride});
    }
  }
  access.end += extent(access, 0);
  return access;
}

std::optional<Access> pinned_access_of(const at::Tensor& tensor, bool writes) {
  const auto block = pinned_block(tensor.const_data_ptr());
  if (!block) {
    return std::nullopt;
  }
  auto access = access_of(tensor, writes);
  const auto* first = static_cast<const char*>(tensor.const_data_ptr());
  access.base = block->memory.get();
  access.begin = first - static_cast<const char*>(access.base);
  access.end = access.begin + extent(access, 0);
  return access;
}

void touch_on_host(const std::string& kernel, const std::vector<Access>& accesses) {
  std::lock_guard<std::mutex> lock(mutex);
  for (const auto& access : accesses) {
    for (const auto& record : records[access.base]) {
      if (conflict(access, record, host)) {
        found.insert(race(kernel, "the host", access.writes, record) + ", and the host does not wait for it");
      }
    }
  }
}

void forget(const void* base) {
  if (on) {
    std::lock_guard<std::mutex> lock(mutex);
    records.erase(base);
  }
}

void launch(const std::string& kernel, c10::Stream stream, const std::vector<Access>& accesses) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto name = name_of(stream);
  auto& clock = clocks[name];
  merge(clock, host);
  const auto time = ++clock[name];
  for (const auto& access : accesses) {
    auto& before = records[access.base];
    for (const auto& record : before) {
      if (conflict(access, record, clock)) {
        found.insert(race(kernel, described(name), access.writes, record) + ", and neither waits for the other");
      }
    }
    const auto done = [&](const Record& record) { return replaces(access, name, record); };
    before.erase(std::remove_if(before.begin(), before.end(), done), before.end());
  }
  for (const auto& access : accesses) {
    records[access.base].push_back({name, time, access, kernel});
  }
}

std::shared_ptr<const Clock> clock_of(c10::Stream stream) {
  if (!on) {
    return nullptr;
  }
  std::lock_guard<std::mutex> lock(mutex);
  auto clock = std::make_shared<Clock>(clocks[name_of(stream)]);
  merge(*clock, host);
  return clock;
}

void follow(c10::Stream stream, const Clock& clock) {
  std::lock_guard<std::mutex> lock(mutex);
  merge(clocks[name_of(stream)], clock);
}

void host_follows(const Clock& clock) {
  std::lock_guard<std::mutex> lock(mutex);
  merge(host, clock);
}

void host_follows(c10::Stream stream) {
  if (on) {
    std::lock_guard<std::mutex> lock(mutex);
    merge(host, clocks[name_of(stream)]);
  }
}

void host_follows(c10::DeviceIndex device) {
  if (!on) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [stream, clock] : clocks) {
    if (stream.first == device) {
      merge(host, clock);
    }
  }
}

void release(const void* base, size_t nbytes, c10::Stream owner, const std::vector<c10::StreamId>& recorded) {
  if (!on) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  const auto own = records.find(base);
  if (own == records.end()) {
    return;
  }
  for (auto& record : own->second) {
    const auto id = record.stream.second;
    const bool is_recorded = std::find(recorded.begin(), recorded.end(), id) != recorded.end();
    // The work of a process group holds its tensors itself: its streams have negative ids.
    if (id >= 0 && record.stream != name_of(owner) && !is_recorded) {
      freed[name_of(owner)].push_back({nbytes, std::move(record)});
    }
  }
  records.erase(own);
}

void reuse(size_t nbytes, c10::Stream owner) {
  if (!on) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  auto clock = clocks[name_of(owner)];
  merge(clock, host);
  auto& waiting = freed[name_of(owner)];
  const auto is_over = [&](const auto& use) { return has_seen(clock, use.second); };
  waiting.erase(std::remove_if(waiting.begin(), waiting.end(), is_over), waiting.end());
  for (const auto& [size, record] : waiting) {
    if (nbytes <= size) {
      found.insert(
          "memory of " + described(name_of(owner)) + " is given out again while " + record.kernel + " on " +
          described(record.stream) + (record.access.writes ? " writes" : " reads") +
          " it: it was freed without record_stream, and the stream has not waited");
    }
  }
}

} // namespace emulated

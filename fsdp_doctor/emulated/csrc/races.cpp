#include "races.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <unordered_map>

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

bool overlap(const Access& one, const Access& other) {
  return one.begin < other.end && other.begin < one.end;
}

std::string described(const Name& stream) {
  return "stream " + std::to_string(stream.second) + " of emulated:" + std::to_string(static_cast<int>(stream.first));
}

std::string race(const std::string& kernel, const Name& stream, bool writes, const Record& before) {
  return kernel + " on " + described(stream) + (writes ? " writes" : " reads") + " what " + before.kernel + " on " +
      described(before.stream) + (before.access.writes ? " writes" : " reads") + ", and neither waits for the other";
}

// No longer needed: what a later access that is ordered after it stands for.
bool replaces(const Access& access, const Name& stream, const Record& before) {
  const bool covers = access.begin <= before.access.begin && before.access.end <= access.end;
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
  const auto size = tensor.element_size();
  const auto end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), size, tensor.storage_offset());
  return {tensor.storage().data(), static_cast<size_t>(tensor.storage_offset()) * size, end, writes};
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
      if ((access.writes || record.access.writes) && overlap(access, record.access) && !has_seen(clock, record)) {
        found.insert(race(kernel, name, access.writes, record));
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

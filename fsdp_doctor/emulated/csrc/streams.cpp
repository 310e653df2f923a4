#include "streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace emulated {
namespace {

enum class Kind {
  to_device,
  to_host,
  wait, // what another stream had issued up to some number happened before what follows here
};

using Name = std::pair<c10::DeviceIndex, c10::StreamId>;

struct Item {
  uint64_t number;
  Kind kind;
  Copy copy{};
  std::unique_ptr<char[]> bytes{};
  Name other{};
  uint64_t through = 0;
};

struct Queue {
  std::deque<Item> items;
  uint64_t issued = 0;
  double busy_until = 0; // seconds on the host's clock
};

// A copy may free a tensor's last block, and freeing takes no lock of ours: the blocks know nothing of streams.
std::mutex mutex;
std::map<Name, Queue> queues;
std::atomic<int64_t> in_flight{0};
std::atomic<bool> late{true};
std::atomic<int64_t> streams_made{0};
std::atomic<bool> has_slept{false};

thread_local std::array<c10::StreamId, kMaxDevices> current{};

constexpr auto kAll = std::numeric_limits<uint64_t>::max();

Name name_of(c10::Stream stream) {
  return {stream.device_index(), stream.id()};
}

void complete(Queue& queue, uint64_t through) {
  while (!queue.items.empty() && queue.items.front().number <= through) {
    Item item = std::move(queue.items.front());
    queue.items.pop_front();
    in_flight -= 1;
    if (item.kind == Kind::wait) {
      complete(queues[item.other], item.through);
    } else {
      std::memcpy(item.copy.to, item.bytes ? item.bytes.get() : item.copy.from, item.copy.nbytes);
    }
  }
}

// The number of the last item, up to `through`, that the device itself must see; 0 if there is none. What a wait is for
// has been seen by the device before the wait was issued.
uint64_t last_for_device(const Queue& queue, uint64_t through) {
  uint64_t last = 0;
  for (const auto& item : queue.items) {
    if (item.number > through) {
      break;
    }
    if (item.kind == Kind::to_device) {
      last = item.number;
    }
  }
  return last;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void sleep_until(double moment) {
  if (moment > now()) {
    std::this_thread::sleep_for(std::chrono::duration<double>(moment - now()));
  }
}

double busy_until(const Name& name) {
  if (!has_slept) {
    return 0;
  }
  std::lock_guard<std::mutex> lock(mutex);
  return queues[name].busy_until;
}

bool has_any(const Queue& queue, uint64_t through) {
  return !queue.items.empty() && queue.items.front().number <= through;
}

bool query(const Name& name, uint64_t through) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& queue = queues[name];
  const bool done = !has_any(queue, through);
  complete(queue, through);
  return done;
}

void push(Queue& queue, Item item) {
  item.number = ++queue.issued;
  queue.items.push_back(std::move(item));
  in_flight += 1;
}

} // namespace

void set_late(bool value) {
  late = value;
  if (!value) {
    for (c10::DeviceIndex device = 0; device < kMaxDevices; ++device) {
      synchronize_device(device);
    }
  }
}

bool is_late() {
  return late;
}

int64_t copies_in_flight() {
  return in_flight;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kEmulated, device), current.at(device));
}

c10::Stream exchange_stream(c10::Stream stream) {
  const auto previous = current_stream(stream.device_index());
  current.at(stream.device_index()) = stream.id();
  return previous;
}

c10::Stream default_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(kEmulated, device));
}

c10::Stream new_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kEmulated, device), ++streams_made);
}

void copy_to_device(c10::Stream stream, Copy copy) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& queue = queues[name_of(stream)];
  push(queue, Item{0, Kind::to_device, std::move(copy)});
  if (!late) {
    complete(queue, kAll);
  }
}

void copy_to_host(c10::Stream stream, const Copy& copy) {
  before_kernel(stream);
  std::lock_guard<std::mutex> lock(mutex);
  auto& queue = queues[name_of(stream)];
  Item item{0, Kind::to_host, copy};
  item.bytes = std::make_unique<char[]>(copy.nbytes);
  std::memcpy(item.bytes.get(), copy.from, copy.nbytes);
  push(queue, std::move(item));
  if (!late) {
    complete(queue, kAll);
  }
}

void before_kernel(c10::Stream stream) {
  if (in_flight == 0) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  auto& queue = queues[name_of(stream)];
  complete(queue, last_for_device(queue, kAll));
}

void busy(c10::Stream stream, double seconds) {
  std::lock_guard<std::mutex> lock(mutex);
  has_slept = true;
  auto& until = queues[name_of(stream)].busy_until;
  until = std::max(until, now()) + seconds;
}

void poison_reads(const void* memory, size_t nbytes, c10::Stream owner, const std::vector<c10::StreamId>& recorded) {
  const auto* begin = static_cast<const char*>(memory);
  std::lock_guard<std::mutex> lock(mutex);
  const auto& own = queues[name_of(owner)].items;
  for (auto& [name, queue] : queues) {
    const bool may_read =
        name == name_of(owner) || std::find(recorded.begin(), recorded.end(), name.second) != recorded.end();
    for (auto& item : queue.items) {
      const auto* from = static_cast<const char*>(item.copy.from);
      if (item.kind != Kind::to_host || from < begin || begin + nbytes <= from) {
        continue;
      }
      const auto waits = [&, other = name](const Item& one) {
        return one.kind == Kind::wait && one.other == other && one.through >= item.number;
      };
      if (!may_read && std::none_of(own.begin(), own.end(), waits)) {
        std::memset(item.bytes.get(), 0xff, item.copy.nbytes);
      }
      // The next tensor at this address is another one.
      item.copy.from = nullptr;
    }
  }
}

void synchronize(c10::Stream stream) {
  host_follows(stream);
  sleep_until(busy_until(name_of(stream)));
  if (in_flight == 0) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  complete(queues[name_of(stream)], kAll);
}

void synchronize_device(c10::DeviceIndex device) {
  host_follows(device);
  if (in_flight == 0 && !has_slept) {
    return;
  }
  double until = 0;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& [name, queue] : queues) {
      if (name.first == device) {
        complete(queue, kAll);
        until = std::max(until, queue.busy_until);
      }
    }
  }
  sleep_until(until);
}

void synchronize(const Event& event) {
  if (event.clock) {
    host_follows(*event.clock);
  }
  sleep_until(event.seconds);
  std::lock_guard<std::mutex> lock(mutex);
  complete(queues[name_of(event.stream)], event.number);
}

bool query(c10::Stream stream) {
  const bool done = busy_until(name_of(stream)) <= now() && query(name_of(stream), kAll);
  if (done) {
    host_follows(stream);
  }
  return done;
}

bool query(const Event& event) {
  const bool done = event.seconds <= now() && query(name_of(event.stream), event.number);
  if (done && event.clock) {
    host_follows(*event.clock);
  }
  return done;
}

Event record(c10::Stream stream) {
  auto clock = clock_of(stream);
  std::lock_guard<std::mutex> lock(mutex);
  const auto& queue = queues[name_of(stream)];
  return {stream, queue.issued, std::max(now(), queue.busy_until), std::move(clock)};
}

double milliseconds_between(uintptr_t begin, uintptr_t end) {
  TORCH_CHECK(begin != 0 && end != 0, "Both events must be recorded before calculating elapsed time.");
  return 1000 * (reinterpret_cast<const Event*>(end)->seconds - reinterpret_cast<const Event*>(begin)->seconds);
}

void wait_for(c10::Stream stream, const Event& event) {
  if (event.clock) {
    follow(stream, *event.clock);
  }
  if ((in_flight == 0 && !has_slept) || stream == event.stream) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  auto& until = queues[name_of(stream)].busy_until;
  until = std::max(until, has_slept ? event.seconds : 0);
  auto& other = queues[name_of(event.stream)];
  complete(other, last_for_device(other, event.number));
  if (has_any(other, event.number)) {
    Item item{0, Kind::wait};
    item.other = name_of(event.stream);
    item.through = event.number;
    push(queues[name_of(stream)], std::move(item));
  }
}

} // namespace emulated

// Streams, events, and the copies that they order.
//
// A kernel runs when it is called. A non-blocking copy between the device and pinned memory is
// late: it happens when something must see it, and not before. The device sees it when the next
// kernel of its stream, or of a stream that waited for it, runs. The host sees it when it waits:
// for the stream, for an event behind it, for the device, or by a blocking copy on the stream. A host
// read before that finds the bytes of before, as it may on a real device whenever the link is busy.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "memory.h"
#include "races.h"

namespace emulated {

constexpr c10::DeviceIndex kMaxDevices = 64;

struct Copy {
  void* to;
  const void* from;
  size_t nbytes;
  // Keep both ends where they are; either may be null for memory that outlives the copy anyway.
  BlockPtr keeps_to;
  BlockPtr keeps_from;
};

// What an event is on this device. A null pointer is an event that was not recorded.
struct Event {
  c10::Stream stream;
  uint64_t number; // of the last copy before it
  double seconds; // when it is over, on the host's clock
  std::shared_ptr<const Clock> clock;
};

void set_late(bool late);
bool is_late();
// How many copies were issued and have not happened yet, on all streams.
int64_t copies_in_flight();

c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device);

void copy_to_device(c10::Stream stream, Copy copy);
// The bytes are those of the moment of the call: a kernel that comes later cannot change them.
void copy_to_host(c10::Stream stream, const Copy& copy);

// A kernel that does nothing for so long: the host waits for it where it waits for the stream, and a query of
// the stream says no before.
void busy(c10::Stream stream, double seconds);
// What copies to the host have yet to bring of this memory is not-a-number, but for those on streams that its owner
// waits for, or that were recorded.
void poison_reads(const void* memory, size_t nbytes, c10::Stream owner, const std::vector<c10::StreamId>& recorded);

// A kernel of this stream is about to run.
void before_kernel(c10::Stream stream);
// The host waits for all of a stream, of a device, of what is before an event.
void synchronize(c10::Stream stream);
void synchronize_device(c10::DeviceIndex device);
void synchronize(const Event& event);
// Whether the host would not have to wait; if so, what it does next comes after. What is asked for happens by itself sooner
// or later: the next query finds it done.
bool query(c10::Stream stream);
bool query(const Event& event);

Event record(c10::Stream stream);
// Of two events by what torch.Event.event_id says; 0 is one that was not recorded.
double milliseconds_between(uintptr_t begin, uintptr_t end);
// Kernels of `stream` that come later see what came before the event.
void wait_for(c10::Stream stream, const Event& event);

} // namespace emulated

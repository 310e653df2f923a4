#include "neighbours.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "streams.h"

namespace emulated {
namespace {

constexpr size_t kMostProcesses = 256;

struct Process {
  std::atomic<int64_t> pid;
  std::array<std::atomic<int64_t>, kMaxDevices> in_use;
};

using Processes = std::array<Process, kMostProcesses>;

Processes* all = nullptr;
Process* own = nullptr;

bool has_ended(int64_t pid) {
  return kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH;
}

Process* claim(Processes& processes) {
  for (auto& process : processes) {
    auto pid = process.pid.load();
    if ((pid == 0 || has_ended(pid)) && process.pid.compare_exchange_strong(pid, getpid())) {
      for (auto& nbytes : process.in_use) {
        nbytes = 0;
      }
      return &process;
    }
  }
  TORCH_CHECK(false, "more than ", kMostProcesses, " processes share these devices");
}

} // namespace

void share_devices(const std::string& path) {
  TORCH_CHECK(all == nullptr, "this process shares its devices already");
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  TORCH_CHECK_VALUE(file >= 0, "cannot open ", path, ": ", std::strerror(errno));
  void* memory = MAP_FAILED;
  if (ftruncate(file, sizeof(Processes)) == 0) {
    memory = mmap(nullptr, sizeof(Processes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  close(file);
  TORCH_CHECK_VALUE(memory != MAP_FAILED, "cannot map ", path, ": ", std::strerror(errno));
  all = static_cast<Processes*>(memory);
  own = claim(*all);
}

void say_in_use(c10::DeviceIndex device, int64_t nbytes) {
  if (own != nullptr && own->pid == getpid()) {
    own->in_use.at(device) = nbytes;
  }
}

int64_t in_use_by_others(c10::DeviceIndex device) {
  int64_t total = 0;
  if (all != nullptr) {
    for (auto& process : *all) {
      const auto pid = process.pid.load();
      if (pid != 0 && pid != getpid() && !has_ended(pid)) {
        total += process.in_use.at(device);
      }
    }
  }
  return total;
}

} // namespace emulated

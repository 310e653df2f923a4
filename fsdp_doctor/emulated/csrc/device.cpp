#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <pthread.h>

#include <atomic>
#include <cstring>
#include <random>
#include <vector>

#include "memory.h"
#include "streams.h"

namespace emulated {
namespace {

std::atomic<c10::DeviceIndex> number_of_devices{1};
std::atomic<bool> initialized{false};
std::atomic<bool> in_bad_fork{false};
thread_local c10::DeviceIndex current_index = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kEmulated;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kEmulated, exchange_device(device.index())};
  }
  c10::Device getDevice() const override {
    return {kEmulated, current_index};
  }
  void setDevice(c10::Device device) const override {
    exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_index = device.index() >= 0 ? device.index() : current_index;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(index_of(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return query(stream);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(stream);
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    synchronize_device(device);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    destroyEvent(*event, stream.device_index());
    *event = new Event(emulated::record(stream));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_for(stream, *static_cast<Event*>(event));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || query(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      synchronize(*static_cast<Event*>(event));
    }
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    return milliseconds_between(reinterpret_cast<uintptr_t>(begin), reinterpret_cast<uintptr_t>(end));
  }

 private:
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_index;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// As on CUDA a generator is a seed and an offset, 16 bytes that can be got, set and compared, and each
// operation draws from a stream of its own.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl(
            c10::Device(kEmulated, device),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 16, "the random state of an emulated device has 16 bytes, not ", state.numel());
    const auto* data = state.data_dtype_initialized<uint8_t>();
    std::memcpy(&seed_, data, 8);
    std::memcpy(&offset_, data + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    // Not through the dispatcher: under a mode such as FakeTensorMode the result would have no memory.
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto* data = state.mutable_data_ptr<uint8_t>();
    std::memcpy(data, &seed_, 8);
    std::memcpy(data + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }

  uint64_t next_seed() {
    std::seed_seq mixed{seed_ & 0xffffffff, seed_ >> 32, offset_ & 0xffffffff, offset_ >> 32};
    uint32_t words[2];
    mixed.generate(words, words + 2);
    const bool first = offset_ == 0;
    offset_ += 4;
    // The first operation after a seed draws what the CPU would.
    return first ? seed_ : (static_cast<uint64_t>(words[0]) << 32 | words[1]);
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchange_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_index;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return static_cast<bool>(pinned_block(data));
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_index : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_index : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    const auto device = storage.device().index();
    before_kernel(current_stream(device));
    auto data = on_device(host_memory(nbytes, device), nbytes, device);
    const auto kept = std::min(nbytes, storage.nbytes());
    if (kept > 0) {
      std::memcpy(data.get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(nbytes);
  }
};

} // namespace

void initialize() {
  if (initialized) {
    return;
  }
  TORCH_CHECK(
      !in_bad_fork,
      "Cannot re-initialize the emulated device in forked subprocess. To use the emulated device with "
      "multiprocessing, you must use the 'spawn' start method");
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    in_bad_fork = in_bad_fork || initialized;
    initialized = false;
  });
  TORCH_CHECK(registered == 0, "what is to be done after a fork cannot be registered");
  initialized = true;
}

bool is_initialized() {
  return initialized;
}

bool is_in_bad_fork() {
  return in_bad_fork;
}

void set_device_count(c10::DeviceIndex count) {
  const bool possible = count > 0 && count <= kMaxDevices;
  TORCH_CHECK(possible, "there can be 1 to ", int(kMaxDevices), " emulated devices, not ", int(count));
  number_of_devices = count;
}

c10::DeviceIndex device_count() {
  return number_of_devices;
}

c10::DeviceIndex current_device() {
  return current_index;
}

void check_device(c10::DeviceIndex device) {
  TORCH_CHECK(
      device < device_count(),
      "emulated error: invalid device ordinal ",
      int(device),
      ", there are ",
      int(device_count()));
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  const auto previous = current_index;
  if (device >= 0) {
    initialize();
    check_device(device);
    current_index = device;
  }
  return previous;
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex index = 0; index < kMaxDevices; ++index) {
      made->push_back(new_generator(index));
    }
    return made;
  }();
  return generators->at(device);
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device);
}

at::Generator draw(const at::Generator& generator) {
  auto* own = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(own != nullptr, "Expected an 'emulated' device type for generator but found '", generator.device(), "'");
  std::lock_guard<std::mutex> lock(own->mutex_);
  return at::make_generator<at::CPUGeneratorImpl>(own->next_seed());
}

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

} // namespace emulated

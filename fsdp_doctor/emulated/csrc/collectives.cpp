#include "collectives.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <thread>

#include "agreement.h"
#include "fallback.h"
#include "memory.h"
#include "races.h"
#include "streams.h"

namespace emulated {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using c10d::OpType;
using c10d::ReduceOp;
using HostWork = c10::intrusive_ptr<c10d::Work>;

// The tensor's elements as they lie, in one dimension: what is sent has no shape. Somebody else keeps the memory.
Tensor flat_host(const Tensor& tensor) {
  check_memory(tensor);
  return HostView().to_host(tensor).as_strided({tensor.numel()}, {1});
}

Tensors flat_hosts(const Tensors& tensors) {
  Tensors hosts;
  for (const auto& tensor : tensors) {
    hosts.push_back(flat_host(tensor));
  }
  return hosts;
}

std::vector<Tensors> flat_hosts(const std::vector<Tensors>& lists) {
  std::vector<Tensors> hosts;
  for (const auto& tensors : lists) {
    hosts.push_back(flat_hosts(tensors));
  }
  return hosts;
}

Tensors joined(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& tensors : lists) {
    all.insert(all.end(), tensors.begin(), tensors.end());
  }
  return all;
}

std::vector<int64_t> numels_of(const Tensors& tensors) {
  std::vector<int64_t> numels;
  for (const auto& tensor : tensors) {
    numels.push_back(tensor.numel());
  }
  return numels;
}

int64_t numel_of(const Tensors& tensors) {
  const auto numels = numels_of(tensors);
  return std::accumulate(numels.begin(), numels.end(), int64_t{0});
}

int64_t bytes_of(const Tensors& tensors) {
  int64_t sum = 0;
  for (const auto& tensor : tensors) {
    sum += static_cast<int64_t>(tensor.nbytes());
  }
  return sum;
}

// The end of something. It holds no tensor: who waits for it and who brings it about share nothing else, so
// that a tensor is freed when its user lets go of it.
class Moment {
 public:
  using Then = std::function<void(std::exception_ptr)>;

  void reach(std::exception_ptr error) {
    std::vector<Then> followers;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      reached_ = true;
      error_ = error;
      followers.swap(followers_);
      changed_.notify_all();
    }
    for (const auto& then : followers) {
      then(error);
    }
  }

  void then(Then follower) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!reached_) {
        followers_.push_back(std::move(follower));
        return;
      }
    }
    follower(error_);
  }

  bool is_reached() {
    std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
  }

  std::exception_ptr error() {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

  void wait(std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto reached = [this] { return reached_; };
    if (timeout == ::kNoTimeout) {
      changed_.wait(lock, reached);
    } else {
      TORCH_CHECK(changed_.wait_for(lock, timeout, reached), "Operation timed out!");
    }
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::exception_ptr error_;
  std::vector<Then> followers_;
};

using MomentPtr = std::shared_ptr<Moment>;

class Work : public c10d::Work {
 public:
  Work(int rank, OpType type, Tensors outputs, c10::Device device, MomentPtr done, std::shared_ptr<const Clock> clock)
      : c10d::Work(rank, type),
        outputs_(std::move(outputs)),
        device_(device),
        done_(std::move(done)),
        clock_(std::move(clock)) {}

  bool isCompleted() override {
    const bool done = done_->is_reached();
    if (done && clock_) {
      host_follows(*clock_);
    }
    return done;
  }
  bool isSuccess() const override {
    return done_->is_reached() && !done_->error();
  }
  std::exception_ptr exception() const override {
    return done_->error();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    done_->wait(timeout);
    if (clock_) {
      follow(current_stream(device_.index()), *clock_);
    }
    return true;
  }
  void synchronize() override {
    wait(::kNoTimeout);
  }
  Tensors result() override {
    return outputs_;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_});
    done_->then([future, outputs = outputs_, device = device_.index(), clock = clock_](std::exception_ptr error) {
      // Who waits for the future waits for the stream that is current where it is completed.
      const auto stream = clock ? new_stream(device) : current_stream(device);
      if (clock) {
        follow(stream, *clock);
      }
      const auto before = exchange_stream(stream);
      error ? future->setError(error) : future->markCompleted(c10::IValue(outputs));
      exchange_stream(before);
    });
    return future;
  }

 private:
  Tensors outputs_;
  c10::Device device_;
  MomentPtr done_;
  std::shared_ptr<const Clock> clock_; // null while no races are detected
};

struct Task {
  Header header;
  bool asks; // point-to-point operations concern two ranks, and ask nobody
  Tensors keeps; // whose memory the host works on
  std::function<HostWork()> issue;
  std::function<void()> after;
  MomentPtr before; // what must be complete first; null for nothing
  MomentPtr done;
  at::ThreadLocalState caller{}; // inference mode among it: the tensors are of the caller's making
};

// In which order the collectives of a device are launched, by all groups and all processes: a file for each device, to
// which every process appends.
class LaunchLog {
 public:
  // An empty directory ends it.
  void write_to(const std::string& directory) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [device, file] : files_) {
      close(file);
    }
    files_.clear();
    directory_ = directory;
  }

  void note(c10::DeviceIndex device, const std::string& line) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (directory_.empty()) {
      return;
    }
    auto& file = files_.try_emplace(device, -1).first->second;
    if (file < 0) {
      const auto path = directory_ + "/" + std::to_string(static_cast<int>(device));
      file = open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    }
    const auto written = ::write(file, line.data(), line.size());
    TORCH_CHECK(written == static_cast<ssize_t>(line.size()), "cannot write to ", directory_, ": ", std::strerror(errno));
  }

 private:
  std::mutex mutex_;
  std::string directory_;
  std::map<c10::DeviceIndex, int> files_;
};

LaunchLog launch_log;

// Complete when all of them are.
class Together : public c10d::Work {
 public:
  explicit Together(std::vector<HostWork> works) : works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& work : works_) {
      work->wait(timeout);
    }
    return true;
  }

 private:
  std::vector<HostWork> works_;
};

// gloo's threads hold a task somewhat longer than it runs; what it was given is let go of here.
void complete(Task& task, std::exception_ptr error) {
  task.keeps.clear();
  task.issue = nullptr;
  task.after = nullptr;
  task.before.reset();
  task.done->reach(error);
}

// gloo works on several operations of a group at once; they are complete in the order of their calls.
void finish(const std::shared_ptr<Task>& task, std::exception_ptr error) {
  try {
    if (!error && task->after) {
      const at::ThreadLocalStateGuard caller(task->caller);
      const at::AutoDispatchBelowAutograd below;
      task->after();
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (!task->before) {
    complete(*task, error);
    return;
  }
  task->before->then([task, error](std::exception_ptr) { complete(*task, error); });
}

// gloo gives no future for what concerns two ranks, and such work must not hold up the rest.
void finish_later(const std::shared_ptr<Task>& task, const HostWork& host) {
  std::thread([task, host] {
    std::exception_ptr error;
    try {
      host->wait();
    } catch (...) {
      error = std::current_exception();
    }
    finish(task, error);
  }).detach();
}

// The host's work is under way after it; ours is complete when it is, and what comes after it.
void issue(const std::shared_ptr<Task>& task) {
  try {
    const at::ThreadLocalStateGuard caller(task->caller);
    auto host = std::exchange(task->issue, nullptr)();
    if (!task->asks) {
      finish_later(task, host);
      return;
    }
    host->getFuture()->addCallback([task](c10::ivalue::Future& done) { finish(task, done.exception_ptr()); });
  } catch (...) {
    finish(task, std::current_exception());
  }
}

// The stream of a process group. Its operations begin one after the other, each when all ranks have
// come to it; the caller does not wait for that.
class Line {
 public:
  explicit Line(std::unique_ptr<Agreement> agreement) : agreement_(std::move(agreement)) {}

  void put(std::shared_ptr<Task> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    // The last rank to come need not trouble the thread.
    if (tasks_.empty() && !busy_ && !stuck_) {
      if (!task->asks) {
        issue(task);
        return;
      }
      agreement_->ask(task->header);
      asked_ = true;
      if (agreement_->look() == Answer::same) {
        asked_ = false;
        issue(task);
        return;
      }
    }
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

  void stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    changed_.notify_one();
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopped_ || (!tasks_.empty() && !stuck_); });
      if (stopped_) {
        return;
      }
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      const bool asked = std::exchange(asked_, false);
      lock.unlock();
      const bool agreed = !task->asks || agree(*task, asked);
      if (agreed) {
        issue(task);
      }
      lock.lock();
      busy_ = false;
      stuck_ = !agreed;
    }
  }

 private:
  // False: the ranks do not agree, so what they came for is never done, nor anything after it.
  bool agree(Task& task, bool asked) {
    try {
      if (!asked) {
        agreement_->ask(task.header);
      }
      auto answer = agreement_->look();
      while (answer == Answer::not_yet && !stopped_) {
        answer = agreement_->wait();
      }
      return answer == Answer::same;
    } catch (...) {
      complete(task, std::current_exception());
      return false;
    }
  }

  std::unique_ptr<Agreement> agreement_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Task>> tasks_;
  bool asked_ = false; // the first of the tasks has asked already
  bool busy_ = false; // the thread is at a task
  bool stuck_ = false;
  std::atomic<bool> stopped_{false};
};

// What a group that is split off takes over of the one that it comes from.
struct GroupOptions final : c10d::Backend::Options {
  using c10d::Backend::Options::Options;
};

// From a store, a rank, a size and a timeout.
using MakeBackend = std::function<c10::intrusive_ptr<
    c10d::Backend>(const c10::intrusive_ptr<c10d::Store>&, int, int, std::chrono::milliseconds)>;

class Backend final : public c10d::Backend {
 public:
  Backend(
      const c10::intrusive_ptr<c10d::Backend>& host,
      std::unique_ptr<Agreement> agreement,
      std::string name,
      std::chrono::milliseconds timeout,
      MakeBackend make)
      : c10d::Backend(host->getRank(), host->getSize()),
        host_(host),
        name_(std::move(name)),
        line_(std::make_shared<Line>(std::move(agreement))),
        options_(c10::make_intrusive<GroupOptions>("emulated", timeout)),
        make_(std::move(make)) {
    // Detached: a rank whose peers are gone waits for ever, and must be able to exit all the same.
    std::thread([line = line_] { line->run(); }).detach();
  }

  ~Backend() override {
    line_->stop();
  }

  const std::string getBackendName() const override {
    return "emulated";
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    host_->setTimeout(timeout);
    options_->timeout = timeout;
  }

  void shutdown() override {
    is_shut_down_ = true;
  }

  bool supportsSplitting() const override {
    return true;
  }

  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options_;
  }

  // Of the ranks of this group, those that come together in the new one. The others call it too, and get none.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override {
    const auto own = std::find(ranks.begin(), ranks.end(), getRank());
    if (own == ranks.end()) {
      return nullptr;
    }
    auto prefix = "split/" + options->group_name;
    for (const int rank : ranks) {
      prefix += "/" + std::to_string(rank);
    }
    return make_(
        c10::make_intrusive<c10d::PrefixStore>(prefix, store->clone()),
        static_cast<int>(own - ranks.begin()),
        static_cast<int>(ranks.size()),
        options->timeout);
  }

  void setSequenceNumberForGroup() override {}

  uint64_t getSequenceNumberForGroup() override {
    return sequence_;
  }

  void startCoalescing() override {
    coalesced_.emplace();
  }

  HostWork endCoalescing() override {
    auto works = std::exchange(coalesced_, std::nullopt);
    return c10::make_intrusive<Together>(std::move(works).value_or(std::vector<HostWork>()));
  }

  HostWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    check_one(tensors);
    check_root(options.rootRank);
    return put(
        {OpType::BROADCAST, bytes_of(tensors), options.rootRank},
        tensors,
        {},
        [=, hosts = flat_hosts(tensors)]() mutable { return host_->broadcast(hosts, options); });
  }

  HostWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check_one(tensors);
    auto reduce = Reduce(options.reduceOp, getSize(), tensors[0].scalar_type());
    const auto own = reduce.on_host(options);
    auto hosts = flat_hosts(tensors);
    return put(
        {OpType::ALLREDUCE, bytes_of(tensors), 0, reduce.name()},
        tensors,
        {},
        [=]() mutable {
          reduce.before(hosts);
          return host_->allreduce(hosts, own);
        },
        [=] { reduce.after(hosts); });
  }

  HostWork allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    TORCH_CHECK_VALUE(!tensors.empty(), "Tensor list must be nonempty");
    for (const auto& tensor : tensors) {
      check({tensor});
      TORCH_CHECK_TYPE(tensor.scalar_type() == tensors[0].scalar_type(), "Tensors must have identical type");
      TORCH_CHECK_VALUE(tensor.device() == tensors[0].device(), "Expected list of tensors on the same device");
    }
    return last_of(tensors.size(), [&](size_t i) {
      Tensors one{tensors[i]};
      return allreduce(one, options);
    });
  }

  HostWork reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check_one(tensors);
    check_root(options.rootRank);
    auto reduce = Reduce(options.reduceOp, getSize(), tensors[0].scalar_type());
    const auto own = reduce.on_host(options);
    // gloo uses the tensors of the other ranks as scratch, NCCL leaves them alone.
    auto hosts = flat_hosts(tensors);
    const bool is_root = getRank() == options.rootRank;
    return put(
        {OpType::REDUCE, bytes_of(tensors), options.rootRank, reduce.name()},
        tensors,
        {},
        [=]() mutable {
          for (auto& host : hosts) {
            host = is_root ? host : host.clone();
          }
          reduce.before(hosts);
          return host_->reduce(hosts, own);
        },
        [=] {
          if (is_root) {
            reduce.after(hosts);
          }
        });
  }

  HostWork allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    check_one(inputs);
    check(joined(outputs), /*contiguous=*/false);
    TORCH_CHECK(outputs.size() == 1, "allgather: one list of outputs");
    for (const auto& output : outputs[0]) {
      if (output.numel() != inputs[0].numel()) {
        return gather_different_sizes(outputs[0], inputs[0], options);
      }
    }
    return put(
        {OpType::ALLGATHER, bytes_of(inputs)},
        outputs[0],
        inputs,
        [=, to = flat_hosts(outputs), from = flat_hosts(inputs)]() mutable {
          return host_->allgather(to, from, options);
        });
  }

  HostWork _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    check({output, input});
    TORCH_CHECK_TYPE(input.dtype() == output.dtype(), "output tensor must have the same type as input tensor");
    TORCH_CHECK_VALUE(
        input.numel() * getSize() == output.numel(),
        "output tensor size must be equal to world_size times input tensor size");
    return put(
        {OpType::_ALLGATHER_BASE, static_cast<int64_t>(input.nbytes())},
        {output},
        {input},
        [=, to = flat_host(output), from = flat_host(input)]() mutable {
          return host_->_allgather_base(to, from, options);
        });
  }

  HostWork allgather_into_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    return last_of(inputs.size(), [&](size_t i) { return _allgather_base(outputs.at(i), inputs[i], options); });
  }

  HostWork gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    check_one(inputs);
    check(joined(outputs), /*contiguous=*/false);
    check_lists("gather", "output", outputs, inputs[0], options.rootRank);
    return put(
        {OpType::GATHER, bytes_of(inputs), options.rootRank},
        joined(outputs),
        inputs,
        [=, to = flat_hosts(outputs), from = flat_hosts(inputs)]() mutable {
          return host_->gather(to, from, options);
        });
  }

  HostWork scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    check_one(outputs);
    check(joined(inputs), /*contiguous=*/false);
    check_lists("scatter", "input", inputs, outputs[0], options.rootRank);
    return put(
        {OpType::SCATTER, bytes_of(outputs), options.rootRank},
        outputs,
        joined(inputs),
        [=, to = flat_hosts(outputs), from = flat_hosts(inputs)]() mutable {
          return host_->scatter(to, from, options);
        });
  }

  HostWork reduce_scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    check_one(outputs);
    check(joined(inputs), /*contiguous=*/false);
    TORCH_CHECK(inputs.size() == 1, "reduce_scatter: one list of inputs");
    return put_reduce_scatter(OpType::REDUCE_SCATTER, outputs[0], at::cat(flat_hosts(inputs[0])), options);
  }

  HostWork _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    check({output, input});
    TORCH_CHECK_TYPE(input.dtype() == output.dtype(), "input tensor must be the same type as the output tensor.");
    TORCH_CHECK_VALUE(
        input.numel() == output.numel() * getSize(),
        "input tensor must be the same size as output size times world size");
    return put_reduce_scatter(OpType::_REDUCE_SCATTER_BASE, output, flat_host(input).clone(), options);
  }

  HostWork reduce_scatter_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override {
    return last_of(inputs.size(), [&](size_t i) { return _reduce_scatter_base(outputs.at(i), inputs[i], options); });
  }

  HostWork alltoall_base(
      Tensor& output,
      Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    check({output, input});
    check_memory(output);
    check_memory(input);
    // Sizes are in rows, so the shapes stay.
    return put(
        {OpType::ALLTOALL_BASE, 0},
        {output},
        {input},
        [=, to = HostView().to_host(output), from = HostView().to_host(input)]() mutable {
          return host_->alltoall_base(to, from, output_sizes, input_sizes, options);
        });
  }

  HostWork alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    check(outputs);
    check(inputs);
    const auto to = flat_hosts(outputs);
    const auto received = at::empty({numel_of(outputs)}, to.at(0).options());
    return put(
        {OpType::ALLTOALL, 0},
        outputs,
        inputs,
        [=,
         whole = received,
         from = at::cat(flat_hosts(inputs)),
         to_sizes = numels_of(outputs),
         from_sizes = numels_of(inputs)]() mutable {
          return host_->alltoall_base(whole, from, to_sizes, from_sizes, options);
        },
        [=] {
          int64_t begin = 0;
          for (const auto& host : to) {
            Tensor(host).copy_(received.narrow(0, begin, host.numel()));
            begin += host.numel();
          }
        });
  }

  HostWork send(Tensors& tensors, int to, int tag) override {
    check_one(tensors, /*contiguous=*/false);
    return put_unchecked(
        OpType::SEND, tensors, [=, hosts = flat_hosts(tensors)]() mutable { return host_->send(hosts, to, tag); });
  }

  HostWork recv(Tensors& tensors, int from, int tag) override {
    check_one(tensors, /*contiguous=*/false);
    return put_unchecked(
        OpType::RECV, tensors, [=, hosts = flat_hosts(tensors)]() mutable { return host_->recv(hosts, from, tag); });
  }

  HostWork barrier(const c10d::BarrierOptions& options) override {
    synchronize_device(device_.index());
    return put({OpType::BARRIER, 0}, {}, {}, [=] { return host_->barrier(options); });
  }

 private:
  // gloo knows sums; what NCCL makes of them besides is done before and after.
  class Reduce {
   public:
    Reduce(const ReduceOp& op, int size, at::ScalarType dtype) : op_(op), size_(size), dtype_(dtype) {
      for (const auto& [bitwise, name] : {std::pair{ReduceOp::BAND, "BAND"}, {ReduceOp::BOR, "BOR"}, {ReduceOp::BXOR, "BXOR"}}) {
        TORCH_CHECK_VALUE(op.op_ != bitwise, "Cannot use ReduceOp.", name, " with NCCL");
      }
      TORCH_CHECK_TYPE(op.op_ != ReduceOp::AVG || dtype != at::kBool, "Cannot use ReduceOp.AVG with boolean inputs");
      TORCH_CHECK_TYPE(
          op.op_ != ReduceOp::PREMUL_SUM || at::isFloatingType(dtype),
          "PreMulSum Data type must be half, float, bfloat16 or double");
    }

    int64_t name() const {
      return static_cast<int64_t>(op_.op_);
    }
    template <typename Options>
    Options on_host(Options options) const {
      if (op_.op_ == ReduceOp::AVG || op_.op_ == ReduceOp::PREMUL_SUM) {
        options.reduceOp = ReduceOp::SUM;
      } else if (op_.op_ == ReduceOp::SUM && dtype_ == at::kBool) {
        options.reduceOp = ReduceOp::MAX;
      }
      return options;
    }
    void before(const Tensors& hosts) const {
      for (auto host : hosts) {
        scale(host);
      }
    }
    void after(const Tensors& hosts) const {
      if (op_.op_ == ReduceOp::AVG) {
        for (auto host : hosts) {
          at::isIntegralType(host.scalar_type(), true) ? host.div_(size_, "trunc") : host.div_(size_);
        }
      }
    }

   private:
    void scale(Tensor& host) const {
      if (op_.op_ != ReduceOp::PREMUL_SUM) {
        return;
      }
      const auto* factor = reinterpret_cast<const c10d::NCCLPreMulSumSupplement*>(op_.supplement_.get());
      if (factor->tensor_factor.defined()) {
        host.mul_(HostView().to_host(factor->tensor_factor));
      } else {
        host.mul_(factor->double_factor);
      }
    }

    ReduceOp op_;
    int size_;
    at::ScalarType dtype_;
  };

  // These are NCCL's checks, with the errors that it raises. Tensors in lists, and those that two ranks exchange, need not be
  // contiguous.
  void check(const Tensors& tensors, bool contiguous = true) {
    for (const auto& tensor : tensors) {
      TORCH_CHECK_VALUE(
          tensor.device().type() == kEmulated && tensor.layout() == at::kStrided,
          "Tensors must be on an emulated device and dense");
      TORCH_CHECK_VALUE(
          contiguous ? tensor.is_contiguous(tensor.suggest_memory_format()) : tensor.is_non_overlapping_and_dense(),
          "Tensors must be contiguous");
      const auto dtype = tensor.scalar_type();
      const bool other = dtype == at::kShort || dtype == at::kUInt16 || dtype == at::kUInt32 || dtype == at::kUInt64;
      TORCH_CHECK_TYPE(!other, "Input tensor data type is not supported for NCCL process group: ", dtype);
      device_ = tensor.device();
    }
  }

  void check_one(const Tensors& tensors, bool contiguous = true) {
    TORCH_CHECK(tensors.size() == 1, "Expecting one tensor only but got multiple");
    check(tensors, contiguous);
  }

  void check_root(int64_t root) {
    const bool exists = 0 <= root && root < getSize();
    TORCH_CHECK_WITH(DistBackendError, exists, "NCCL error: invalid argument (root ", root, " of ", getSize(), " ranks)");
  }

  // Of gather and scatter: the root has one list, with a tensor like its own for each rank, the others have none.
  void check_lists(
      const std::string& name,
      const std::string& side,
      const std::vector<Tensors>& lists,
      const Tensor& like,
      int64_t root) {
    const auto refuse = [&](const std::string& why) { C10_THROW_ERROR(ValueError, "ProcessGroupNCCL::" + name + ": " + why); };
    c10d::assertRootRank(refuse, root, getSize());
    if (getRank() != root) {
      return lists.empty() ? void() : refuse("requires empty " + side + " on non-root");
    }
    if (lists.size() != 1) {
      refuse("requires a single-element " + side + " list containing a list with " + std::to_string(getSize()) + " tensors.");
    }
    if (lists[0].size() != static_cast<size_t>(getSize())) {
      refuse(c10::str("Incorrect ", side, " list size ", lists[0].size(), ", should be ", getSize(), ", same as size of the process group."));
    }
    c10d::assertTypeAndSizesMatch(refuse, lists[0], like.options(), like.sizes());
  }

  // gloo too reduces everything everywhere and keeps the rank's own part. whole: host memory of our own.
  HostWork put_reduce_scatter(
      OpType type,
      const Tensor& output,
      const Tensor& whole,
      const c10d::ReduceScatterOptions& options) {
    auto reduce = Reduce(options.reduceOp, getSize(), output.scalar_type());
    c10d::AllreduceOptions own;
    own.reduceOp = options.reduceOp;
    own.timeout = options.timeout;
    own = reduce.on_host(own);
    auto to = flat_host(output);
    return put(
        {type, static_cast<int64_t>(output.nbytes()), 0, reduce.name()},
        {output},
        {},
        [=, all = Tensors{whole}]() mutable {
          reduce.before(all);
          return host_->allreduce(all, own);
        },
        [=]() mutable {
          to.copy_(whole.narrow(0, getRank() * to.numel(), to.numel()));
          reduce.after({to});
        });
  }

  // NCCL too sends one from each rank in turn.
  HostWork gather_different_sizes(Tensors& outputs, const Tensor& input, const c10d::AllgatherOptions& options) {
    outputs.at(getRank()).copy_(input);
    return last_of(getSize(), [&](size_t root) {
      c10d::BroadcastOptions own;
      own.rootRank = static_cast<int64_t>(root);
      own.timeout = options.timeout;
      Tensors one{outputs.at(root)};
      return broadcast(one, own);
    });
  }

  // Several operations as one: they are complete in their order, so it is when the last is.
  template <typename Start>
  static HostWork last_of(size_t count, const Start& start) {
    HostWork last;
    for (size_t i = 0; i < count; ++i) {
      last = start(i);
    }
    return last;
  }

  HostWork put(
      Header header,
      const Tensors& outputs,
      const Tensors& inputs,
      std::function<HostWork()> issue,
      std::function<void()> after = nullptr) {
    auto keeps = outputs;
    keeps.insert(keeps.end(), inputs.begin(), inputs.end());
    return put_task({header, true, std::move(keeps), std::move(issue), std::move(after), last_, nullptr}, outputs);
  }

  HostWork put_unchecked(OpType type, const Tensors& tensors, std::function<HostWork()> issue) {
    return put_task({{type, 0}, false, tensors, std::move(issue), nullptr, nullptr, nullptr}, tensors);
  }

  HostWork put_task(Task task, const Tensors& outputs) {
    // In the words of NCCL, whose communicator is gone then.
    TORCH_CHECK_WITH(DistBackendError, !is_shut_down_, "NCCL communicator was aborted on rank ", getRank(), ". ");
    // A collective begins after what its caller's stream holds, as any kernel.
    before_kernel(current_stream(device_.index()));
    task.done = std::make_shared<Moment>();
    auto work =
        c10::make_intrusive<Work>(getRank(), task.header.type, outputs, device_, task.done, launched(task, outputs));
    if (task.asks) {
      last_ = task.done;
      sequence_ += 1;
      launch_log.note(
          device_.index(),
          name_ + " " + std::to_string(sequence_) + " " + c10d::opTypeToString(task.header.type) + "\n");
    }
    if (coalesced_.has_value()) {
      coalesced_->push_back(work);
    }
    line_->put(std::make_shared<Task>(std::move(task)));
    return work;
  }

  // On a stream of the group, as NCCL's: it waits for the caller's, and the caller's for it in Work::wait.
  std::shared_ptr<const Clock> launched(const Task& task, const Tensors& outputs) {
    if (!detects_races()) {
      return nullptr;
    }
    const c10::Stream own(c10::Stream::UNSAFE, device_, stream_);
    follow(own, *clock_of(current_stream(device_.index())));
    std::vector<Access> accesses;
    for (const auto& tensor : task.keeps) {
      const auto is_same = [&](const Tensor& output) { return output.is_same(tensor); };
      if (tensor.numel() > 0) {
        accesses.push_back(access_of(tensor, std::any_of(outputs.begin(), outputs.end(), is_same)));
      }
    }
    launch("a collective", own, accesses);
    return clock_of(own);
  }

  static c10::StreamId next_stream() {
    static std::atomic<c10::StreamId> last{0};
    return --last;
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  std::string name_; // the same on all ranks
  std::shared_ptr<Line> line_;
  const c10::StreamId stream_ = next_stream();
  c10::intrusive_ptr<GroupOptions> options_;
  MakeBackend make_;
  uint64_t sequence_ = 0;
  bool is_shut_down_ = false;
  MomentPtr last_;
  std::optional<std::vector<HostWork>> coalesced_;
  c10::Device device_{kEmulated, 0};
};

c10::intrusive_ptr<Backend> make_backend(
    const c10::intrusive_ptr<c10d::Backend>& host,
    int file,
    std::string name,
    std::chrono::milliseconds timeout,
    MakeBackend make) {
  auto agreement =
      file >= 0 ? agree_over_memory(file, host->getRank(), host->getSize()) : agree_over_messages(host);
  return c10::make_intrusive<Backend>(host, std::move(agreement), std::move(name), timeout, std::move(make));
}

} // namespace

void bind_collectives(py::module_& m) {
  py::class_<GroupOptions, c10::intrusive_ptr<GroupOptions>, c10d::Backend::Options>(m, "GroupOptions")
      .def("__deepcopy__", [](const GroupOptions& self, const py::dict&) { return c10::make_intrusive<GroupOptions>(self); });
  // Of a group that some ranks are no part of, NCCL has those take note.
  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(m, "Backend")
      .def("perform_nocolor_split", [](Backend&, const py::object&) {})
      .def_property_readonly("options", &Backend::getBackendOptions);
  m.def("shared_bytes", &shared_bytes);
  m.def("make_backend", &make_backend);
  m.def("log_launches", [](const std::string& directory) { launch_log.write_to(directory); });
}

} // namespace emulated

#include "collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <thread>

#include "agreement.h"
#include "fallback.h"
#include "memory.h"
#include "streams.h"

namespace emulated {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using c10d::OpType;
using c10d::ReduceOp;
using HostWork = c10::intrusive_ptr<c10d::Work>;

Tensor host_of(const Tensor& tensor) {
  return HostView().to_host(tensor);
}

Tensors hosts_of(const Tensors& tensors) {
  Tensors hosts;
  for (const auto& tensor : tensors) {
    hosts.push_back(host_of(tensor));
  }
  return hosts;
}

std::vector<Tensors> hosts_of(const std::vector<Tensors>& lists) {
  std::vector<Tensors> hosts;
  for (const auto& tensors : lists) {
    hosts.push_back(hosts_of(tensors));
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

int64_t bytes_of(const Tensors& tensors) {
  int64_t sum = 0;
  for (const auto& tensor : tensors) {
    sum += static_cast<int64_t>(tensor.nbytes());
  }
  return sum;
}

class Work : public c10d::Work {
 public:
  Work(int rank, OpType type, Tensors outputs, c10::Device device)
      : c10d::Work(rank, type),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()),
            std::vector<c10::Device>{device})) {}

  Tensors result() override {
    return outputs_;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

  void complete(std::exception_ptr error) {
    finish(error);
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
  }

 private:
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

struct Task {
  Header header;
  bool asks; // point-to-point operations concern two ranks, and ask nobody
  std::function<HostWork()> issue;
  std::function<void()> after;
  c10::intrusive_ptr<Work> work;
};

void finish(const Task& task, std::exception_ptr error) {
  try {
    if (!error && task.after) {
      const at::AutoDispatchBelowAutograd below;
      task.after();
    }
  } catch (...) {
    error = std::current_exception();
  }
  task.work->complete(error);
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
    finish(*task, error);
  }).detach();
}

// The host's work is under way after it; ours is complete when it is, and what comes after it.
void issue(const std::shared_ptr<Task>& task) {
  try {
    auto host = std::exchange(task->issue, nullptr)();
    if (!task->asks) {
      finish_later(task, host);
      return;
    }
    host->getFuture()->addCallback([task](c10::ivalue::Future& done) { finish(*task, done.exception_ptr()); });
  } catch (...) {
    task->work->complete(std::current_exception());
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
      task.work->complete(std::current_exception());
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

class Backend final : public c10d::Backend {
 public:
  Backend(const c10::intrusive_ptr<c10d::Backend>& host, std::unique_ptr<Agreement> agreement)
      : c10d::Backend(host->getRank(), host->getSize()),
        host_(host),
        line_(std::make_shared<Line>(std::move(agreement))) {
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
  }

  HostWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    check(tensors);
    return put(
        {OpType::BROADCAST, bytes_of(tensors), options.rootRank}, tensors, [=, hosts = hosts_of(tensors)]() mutable {
          return host_->broadcast(hosts, options);
        });
  }

  HostWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check(tensors);
    auto reduce = Reduce(options.reduceOp, getSize());
    auto own = options;
    own.reduceOp = reduce.on_host();
    auto hosts = hosts_of(tensors);
    return put(
        {OpType::ALLREDUCE, bytes_of(tensors), 0, reduce.name()},
        tensors,
        [=]() mutable {
          reduce.before(hosts);
          return host_->allreduce(hosts, own);
        },
        [=] { reduce.after(hosts); });
  }

  HostWork allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    check(tensors);
    HostWork last;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      last = allreduce(one, options);
    }
    return last;
  }

  HostWork reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check(tensors);
    auto reduce = Reduce(options.reduceOp, getSize());
    auto own = options;
    own.reduceOp = reduce.on_host();
    // gloo uses the tensors of the other ranks as scratch, NCCL leaves them alone.
    auto hosts = hosts_of(tensors);
    const bool is_root = getRank() == options.rootRank;
    return put(
        {OpType::REDUCE, bytes_of(tensors), options.rootRank, reduce.name()},
        tensors,
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
    check(joined(outputs));
    check(inputs);
    return put(
        {OpType::ALLGATHER, bytes_of(inputs)},
        joined(outputs),
        [=, to = hosts_of(outputs), from = hosts_of(inputs)]() mutable { return host_->allgather(to, from, options); });
  }

  HostWork _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    check({output, input});
    TORCH_CHECK(input.dtype() == output.dtype(), "output tensor must have the same type as input tensor");
    TORCH_CHECK(
        input.numel() * getSize() == output.numel(),
        "output tensor size must be equal to world_size times input tensor size");
    return put(
        {OpType::_ALLGATHER_BASE, static_cast<int64_t>(input.nbytes())},
        {output},
        [=, to = host_of(output), from = host_of(input)]() mutable { return host_->_allgather_base(to, from, options); });
  }

  HostWork allgather_into_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    HostWork last;
    for (size_t i = 0; i < inputs.size(); ++i) {
      last = _allgather_base(outputs.at(i), inputs.at(i), options);
    }
    return last;
  }

  HostWork gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    check(joined(outputs));
    check(inputs);
    return put(
        {OpType::GATHER, bytes_of(inputs), options.rootRank},
        joined(outputs),
        [=, to = hosts_of(outputs), from = hosts_of(inputs)]() mutable { return host_->gather(to, from, options); });
  }

  HostWork scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    check(outputs);
    check(joined(inputs));
    return put(
        {OpType::SCATTER, bytes_of(outputs), options.rootRank},
        outputs,
        [=, to = hosts_of(outputs), from = hosts_of(inputs)]() mutable { return host_->scatter(to, from, options); });
  }

  HostWork reduce_scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    check(outputs);
    check(joined(inputs));
    TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1, "reduce_scatter: one output and one list of inputs");
    Tensors flat;
    for (const auto& input : hosts_of(inputs[0])) {
      flat.push_back(input.reshape({-1}));
    }
    return put_reduce_scatter(OpType::REDUCE_SCATTER, outputs[0], at::cat(flat), options);
  }

  HostWork _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    check({output, input});
    TORCH_CHECK(input.dtype() == output.dtype(), "input tensor must be the same type as the output tensor.");
    TORCH_CHECK(
        input.numel() == output.numel() * getSize(),
        "input tensor must be the same size as output size times world size");
    return put_reduce_scatter(OpType::_REDUCE_SCATTER_BASE, output, host_of(input).reshape({-1}).clone(), options);
  }

  HostWork reduce_scatter_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override {
    HostWork last;
    for (size_t i = 0; i < inputs.size(); ++i) {
      last = _reduce_scatter_base(outputs.at(i), inputs.at(i), options);
    }
    return last;
  }

  HostWork alltoall_base(
      Tensor& output,
      Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    check({output, input});
    return put(
        {OpType::ALLTOALL_BASE, 0}, {output}, [=, to = host_of(output), from = host_of(input)]() mutable {
          return host_->alltoall_base(to, from, output_sizes, input_sizes, options);
        });
  }

  HostWork alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    check(outputs);
    check(inputs);
    return put({OpType::ALLTOALL, 0}, outputs, [=, to = hosts_of(outputs), from = hosts_of(inputs)]() mutable {
      return host_->alltoall(to, from, options);
    });
  }

  HostWork send(Tensors& tensors, int to, int tag) override {
    check(tensors);
    return put_unchecked(
        OpType::SEND, tensors, [=, hosts = hosts_of(tensors)]() mutable { return host_->send(hosts, to, tag); });
  }

  HostWork recv(Tensors& tensors, int from, int tag) override {
    check(tensors);
    return put_unchecked(
        OpType::RECV, tensors, [=, hosts = hosts_of(tensors)]() mutable { return host_->recv(hosts, from, tag); });
  }

  HostWork barrier(const c10d::BarrierOptions& options) override {
    synchronize_device(device_.index());
    return put({OpType::BARRIER, 0}, {}, [=] { return host_->barrier(options); });
  }

 private:
  // gloo knows sums; what NCCL makes of them besides is done before and after.
  class Reduce {
   public:
    Reduce(const ReduceOp& op, int size) : op_(op), size_(size) {}

    int64_t name() const {
      return static_cast<int64_t>(op_.op_);
    }
    ReduceOp on_host() const {
      return op_.op_ == ReduceOp::AVG || op_.op_ == ReduceOp::PREMUL_SUM ? ReduceOp(ReduceOp::SUM) : op_;
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
        host.mul_(host_of(factor->tensor_factor));
      } else {
        host.mul_(factor->double_factor);
      }
    }

    ReduceOp op_;
    int size_;
  };

  void check(const Tensors& tensors) {
    for (const auto& tensor : tensors) {
      TORCH_CHECK(
          tensor.device().type() == kEmulated && tensor.layout() == at::kStrided,
          "Tensors must be on an emulated device and dense");
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
      device_ = tensor.device();
    }
  }

  // gloo too reduces everything everywhere and keeps the rank's own part. whole: host memory of our own.
  HostWork put_reduce_scatter(
      OpType type,
      const Tensor& output,
      const Tensor& whole,
      const c10d::ReduceScatterOptions& options) {
    auto reduce = Reduce(options.reduceOp, getSize());
    c10d::AllreduceOptions own;
    own.reduceOp = reduce.on_host();
    own.timeout = options.timeout;
    auto to = host_of(output);
    return put(
        {type, static_cast<int64_t>(output.nbytes()), 0, reduce.name()},
        {output},
        [=, all = Tensors{whole}]() mutable {
          reduce.before(all);
          return host_->allreduce(all, own);
        },
        [=]() mutable {
          to.copy_(whole.narrow(0, getRank() * to.numel(), to.numel()).view_as(to));
          reduce.after({to});
        });
  }

  HostWork put(
      Header header,
      Tensors outputs,
      std::function<HostWork()> issue,
      std::function<void()> after = nullptr) {
    return put_task({header, true, std::move(issue), std::move(after), nullptr}, std::move(outputs));
  }

  HostWork put_unchecked(OpType type, Tensors outputs, std::function<HostWork()> issue) {
    return put_task({{type, 0}, false, std::move(issue), nullptr, nullptr}, std::move(outputs));
  }

  HostWork put_task(Task task, Tensors outputs) {
    // A collective begins after what its caller's stream holds, as any kernel.
    before_kernel(current_stream(device_.index()));
    auto work = c10::make_intrusive<Work>(getRank(), task.header.type, std::move(outputs), device_);
    task.work = work;
    line_->put(std::make_shared<Task>(std::move(task)));
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  std::shared_ptr<Line> line_;
  c10::Device device_{kEmulated, 0};
};

} // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& host, int file) {
  auto agreement =
      file >= 0 ? agree_over_memory(file, host->getRank(), host->getSize()) : agree_over_messages(host);
  return c10::make_intrusive<Backend>(host, std::move(agreement));
}

} // namespace emulated

#include "collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <thread>

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

// What every rank must say alike of a collective. Ranks that differ stand still, as NCCL's do: gloo
// would end the process.
struct Header {
  OpType type;
  int64_t nbytes; // of what all ranks hold alike; 0 where ranks may differ
  int64_t root = 0;
  int64_t reduce_op = 0;
};

struct Task {
  Header header;
  bool checked; // point-to-point operations are not
  std::function<HostWork()> issue;
  std::function<void()> after;
  c10::intrusive_ptr<Work> work;
};

// The stream of a process group: its operations, one after the other, on a thread of their own.
class Line {
 public:
  explicit Line(c10::intrusive_ptr<c10d::Backend> host) : host_(std::move(host)) {}

  void put(Task task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

  void stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    changed_.notify_one();
  }

  void run() {
    const at::AutoDispatchBelowAutograd below;
    while (true) {
      Task task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return stopped_ || !tasks_.empty(); });
        if (tasks_.empty()) {
          return;
        }
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      if (!perform(task)) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return stopped_; });
        return;
      }
    }
  }

 private:
  // False: the ranks do not agree on what to do, so it is never done.
  bool perform(Task& task) {
    try {
      if (task.checked && !agreed(task.header)) {
        return false;
      }
      task.issue()->wait();
      if (task.after) {
        task.after();
      }
      task.issue = nullptr;
      task.work->complete(nullptr);
    } catch (...) {
      task.work->complete(std::current_exception());
    }
    return true;
  }

  bool agreed(const Header& header) {
    auto mine = at::empty({4}, at::kLong);
    auto* words = mine.mutable_data_ptr<int64_t>();
    words[0] = static_cast<int64_t>(header.type);
    words[1] = header.nbytes;
    words[2] = header.root;
    words[3] = header.reduce_op;
    std::vector<Tensors> everyone(1);
    for (int rank = 0; rank < host_->getSize(); ++rank) {
      everyone[0].push_back(at::empty({4}, at::kLong));
    }
    Tensors inputs{mine};
    host_->allgather(everyone, inputs)->wait();
    for (const auto& other : everyone[0]) {
      if (std::memcmp(other.const_data_ptr(), words, 4 * sizeof(int64_t)) != 0) {
        return false;
      }
    }
    return true;
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool stopped_ = false;
};

class Backend final : public c10d::Backend {
 public:
  explicit Backend(const c10::intrusive_ptr<c10d::Backend>& host)
      : c10d::Backend(host->getRank(), host->getSize()), host_(host), line_(std::make_shared<Line>(host)) {
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
    auto reduce = Reduce(options.reduceOp, getSize());
    auto own = options;
    own.reduceOp = reduce.on_host();
    auto to = hosts_of(outputs);
    return put(
        {OpType::REDUCE_SCATTER, bytes_of(outputs), 0, reduce.name()},
        outputs,
        [=, from = hosts_of(inputs)]() mutable {
          for (auto& list : from) {
            reduce.before_copies(list);
          }
          return host_->reduce_scatter(to, from, own);
        },
        [=] { reduce.after(to); });
  }

  HostWork _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    check({output, input});
    TORCH_CHECK(input.dtype() == output.dtype(), "input tensor must be the same type as the output tensor.");
    TORCH_CHECK(
        input.numel() == output.numel() * getSize(),
        "input tensor must be the same size as output size times world size");
    auto reduce = Reduce(options.reduceOp, getSize());
    auto own = options;
    own.reduceOp = reduce.on_host();
    auto to = host_of(output);
    return put(
        {OpType::_REDUCE_SCATTER_BASE, static_cast<int64_t>(output.nbytes()), 0, reduce.name()},
        {output},
        [=, from = Tensors{host_of(input)}]() mutable {
          reduce.before_copies(from);
          return host_->_reduce_scatter_base(to, from[0], own);
        },
        [=] { reduce.after({to}); });
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
        scale(host, host);
      }
    }
    // For inputs, which are not ours to change.
    void before_copies(Tensors& hosts) const {
      if (op_.op_ == ReduceOp::PREMUL_SUM) {
        for (auto& host : hosts) {
          auto copy = at::empty_like(host);
          scale(copy, host);
          host = copy;
        }
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
    void scale(Tensor& to, const Tensor& from) const {
      if (op_.op_ != ReduceOp::PREMUL_SUM) {
        return;
      }
      const auto* factor = reinterpret_cast<const c10d::NCCLPreMulSumSupplement*>(op_.supplement_.get());
      if (factor->tensor_factor.defined()) {
        at::mul_out(to, from, host_of(factor->tensor_factor));
      } else {
        at::mul_out(to, from, at::scalar_tensor(factor->double_factor, from.options()));
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
    line_->put(std::move(task));
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  std::shared_ptr<Line> line_;
  c10::Device device_{kEmulated, 0};
};

} // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& host) {
  return c10::make_intrusive<Backend>(host);
}

} // namespace emulated

#include "gloo.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <string>
#include <utility>
#include <vector>

#include "fallback.h"
#include "memory.h"
#include "streams.h"

namespace emulated {
namespace {

using at::Tensor;
using c10::IValue;

// Host tensors on the memory of the device's, which they keep for as long as gloo works on them.
class Lent {
 public:
  IValue to_host(const IValue& value) {
    return each(value, [this](const Tensor& tensor) { return host(tensor); });
  }

  IValue to_device(const IValue& value) {
    return each(value, [this](const Tensor& tensor) { return own(tensor); });
  }

 private:
  template <typename Change>
  static IValue each(const IValue& value, const Change& change) {
    if (value.isTensor()) {
      return value.toTensor().defined() ? change(value.toTensor()) : value;
    }
    if (!value.isList()) {
      return value;
    }
    const auto list = value.toList();
    c10::impl::GenericList changed(list.elementType());
    for (const IValue& element : list) {
      changed.push_back(each(element, change));
    }
    return changed;
  }

  Tensor host(const Tensor& tensor) {
    if (tensor.device().type() != kEmulated) {
      return tensor;
    }
    check_memory(tensor);
    before_kernel(current_stream(tensor.device().index()));
    auto made = at::from_blob(
        tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {},
        tensor.options().device(at::kCPU));
    lent_.emplace_back(tensor, made);
    return made;
  }

  Tensor own(const Tensor& tensor) const {
    for (const auto& [owner, host] : lent_) {
      if (host.is_same(tensor)) {
        return owner;
      }
    }
    return tensor;
  }

  std::vector<std::pair<Tensor, Tensor>> lent_; // of the device, of the host
};

bool is_on_gloo(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return group->getBackend(kEmulated)->getBackendName() == "gloo";
}

// Of every device's tensors. Before the kernels that c10d has for a device, and behind autograd and Python: it is
// neither left out where gradients are off, nor does it see a subclass, which has no memory.
void collective(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto begin = stack->end() - static_cast<int64_t>(op.schema().arguments().size());
  const auto group = op.schema().argumentIndexWithName("process_group");
  if (!keys.has(c10::DispatchKey::PrivateUse1) ||
      !is_on_gloo((begin + *group)->toCustomClass<c10d::ProcessGroup>())) {
    op.redispatchBoxed(
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect), stack);
    return;
  }
  const at::AutoDispatchBelowAutograd below;
  Lent lent;
  for (auto value = begin; value != stack->end(); ++value) {
    *value = lent.to_host(*value);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto value = stack->end() - static_cast<int64_t>(op.schema().returns().size()); value != stack->end(); ++value) {
    *value = lent.to_device(*value);
  }
}

} // namespace

void register_gloo() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.name.rfind("c10d::", 0) == 0 && op.has_value() &&
        op->schema().argumentIndexWithName("process_group").has_value() &&
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      library->impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&collective>());
    }
  }
}

} // namespace emulated

#include "fallback.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "attention.h"
#include "copy.h"
#include "cuda_kernels.h"
#include "device.h"
#include "memory.h"
#include "sparse.h"
#include "streams.h"

namespace emulated {
namespace {

using c10::IValue;
using torch::jit::Stack;

void release_storage(void* context) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(context));
}

// It does not keep the device's memory; whoever makes it does.
c10::Storage host_storage_on(const c10::Storage& device) {
  c10::DataPtr data(device.mutable_data(), c10::Device(c10::kCPU));
  return {
      c10::Storage::use_byte_size_t(), device.nbytes(), std::move(data), c10::GetCPUAllocator(), /*resizable=*/true};
}

// Sizes and strides, and what is put off until the elements are read: conjugation and negation.
at::Tensor shaped(at::Tensor tensor, const at::Tensor& like) {
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  tensor._set_conj(like.is_conj());
  tensor._set_neg(like.is_neg());
  return tensor;
}

at::Tensor new_tensor(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  c10::DispatchKeySet keys(key);
  if (like._is_zerotensor()) {
    keys = keys.add(c10::DispatchKey::ZeroTensor);
  }
  return shaped(at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype()), like);
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  return shaped(
      at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype()),
      like);
}

// A host storage that a CPU kernel made becomes the device's.
c10::DataPtr adopted(c10::Storage host, c10::DeviceIndex device) {
  void* data = host.mutable_data();
  // A tensor that is known to be zero has no memory.
  const auto nbytes = data == nullptr ? 0 : host.nbytes();
  auto* impl = host.unsafeReleaseStorageImpl();
  return on_device(c10::DataPtr(data, impl, &release_storage, c10::Device(c10::kCPU)), nbytes, device);
}

// cudaErrorAssert.
constexpr int kDeviceSideAssert = 710;

// What is to be known of an operation before its arguments are seen.
struct Traits {
  bool touches_memory; // false: it changes or returns only sizes, strides and storages
  bool takes_cpu_indices;
  bool random;
};

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

Traits traits_of(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> kMetadata{
      "aten::resize_", "aten::set_", "aten::resize_as_", "aten::as_strided_", "aten::is_set_to", "aten::_coalesced_",
      "aten::_dimI", "aten::_dimV", "aten::_nnz", "aten::dense_dim", "aten::is_coalesced", "aten::sparse_dim"};
  static const std::unordered_set<std::string> kCpuIndices{
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
      "aten::_unsafe_index_put", "aten::tensor_split"};
  const auto& name = op.schema().name();
  return {
      !is_view(op.schema()) && kMetadata.count(name) == 0,
      kCpuIndices.count(name) > 0,
      op.hasTag(at::Tag::nondeterministic_seeded),
  };
}

// The tensors among the arguments, those in lists too.
template <typename Visit>
void each_tensor(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) {
      visit(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      if (tensor.has_value()) {
        visit(*tensor);
      }
    }
  }
}

// Those with memory on the device; of a sparse tensor, its parts.
template <typename Visit>
void each_in_memory(const IValue& value, const Visit& visit) {
  each_tensor(value, [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kEmulated) {
      return;
    }
    for (const auto& part : parts_of(tensor)) {
      if (part.numel() > 0 && !part._is_zerotensor()) {
        visit(part);
      }
    }
  });
}

// The device of a call: of its tensors, or of the device that it is told.
struct Where {
  c10::DeviceIndex device = -1;
  bool result_on_cpu = false;
};

Where where(c10::ArrayRef<IValue> arguments) {
  Where result;
  for (const auto& value : arguments) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (result.device < 0 && tensor.defined() && tensor.device().type() == kEmulated) {
        result.device = tensor.device().index();
      }
    });
    if (value.isDevice()) {
      const auto told = value.toDevice();
      result.result_on_cpu = told.is_cpu();
      if (told.type() == kEmulated) {
        result.device = told.has_index() ? told.index() : current_device();
        check_device(result.device);
      }
    }
    if (value.isStorage() && value.toStorage().device_type() == kEmulated) {
      result.device = value.toStorage().device().index();
    }
  }
  return {result.device < 0 ? current_device() : result.device, result.result_on_cpu};
}

bool is_on_device(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() && tensor->device().type() == kEmulated;
}

// CUDA's words for a host tensor that is indexed by a tensor of the device.
void check_indices(const at::Tensor& indexed, const c10::List<std::optional<at::Tensor>>& indices) {
  if (!indexed.device().is_cpu()) {
    return;
  }
  for (const std::optional<at::Tensor>& index : indices) {
    TORCH_CHECK(
        !is_on_device(index),
        "indices should be either on cpu or on the same device as the indexed tensor (",
        indexed.device(),
        ")");
  }
}

void check_same_device(const at::Tensor& tensor, c10::DeviceIndex device, bool is_index) {
  const auto& other = tensor.device();
  const bool same = other.type() == kEmulated && other.index() == device;
  const bool scalar = other.is_cpu() && tensor.dim() == 0;
  TORCH_CHECK(
      same || scalar || (other.is_cpu() && is_index),
      "Expected all tensors to be on the same device, but found at least two devices, ",
      c10::Device(kEmulated, device),
      " and ",
      other,
      "!");
}

[[noreturn]] void throw_device_side_assert(const std::string& why) {
  throw c10::AcceleratorError(
      {__func__, __FILE__, __LINE__},
      kDeviceSideAssert,
      c10::str("emulated error: device-side assert triggered (", why, ")"));
}

void check_sparse(const at::Tensor& host) {
  if (const auto index = stray_index(host)) {
    throw_device_side_assert(c10::str("index ", *index, " is out of bounds in a sparse tensor of size ", host.sizes()));
  }
}

// tensor_split's second tensor: like an index, it may be on the CPU.
constexpr const char* kSplitPoints = "tensor_indices_or_sections";

class Call {
 public:
  Call(const c10::OperatorHandle& op, Where place)
      : traits_(traits_of(op)), device_(place.device), result_on_cpu_(place.result_on_cpu) {}

  IValue argument(const IValue& value, const c10::Argument& declared) {
    if (value.isTensor()) {
      return host(value.toTensor(), traits_.takes_cpu_indices && declared.name() == kSplitPoints);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> hosts;
      for (const at::Tensor& tensor : value.toTensorList()) {
        hosts.push_back(host(tensor));
      }
      return hosts;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> hosts;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        std::optional<at::Tensor> on_host;
        if (tensor.has_value()) {
          on_host = host(*tensor, traits_.takes_cpu_indices);
        }
        hosts.push_back(std::move(on_host));
      }
      return hosts;
    }
    if (value.isStorage()) {
      return view_.to_host(value.toStorage());
    }
    if (value.isDevice()) {
      return c10::Device(c10::kCPU);
    }
    if (value.isBool() && value.toBool() && declared.name() == "pin_memory" && !result_on_cpu_) {
      TORCH_CHECK(false, "Only dense CPU tensors can be pinned");
    }
    if (traits_.random && is_generator(declared)) {
      has_generator_ = true;
      return draw(value.isNone() ? default_generator(device_) : value.toGenerator());
    }
    return value;
  }

  IValue result(const IValue& value) {
    if (value.isTensor()) {
      return view_.to_device(value.toTensor(), device_);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> results;
      for (const at::Tensor& tensor : value.toTensorList()) {
        results.push_back(view_.to_device(tensor, device_));
      }
      return results;
    }
    return value;
  }

  void write_back() {
    view_.write_back(device_);
  }

  // Random, and with no argument for a generator: it takes the CPU's own.
  bool draws_from_the_cpu() const {
    return traits_.random && !has_generator_;
  }

 private:
  static bool is_generator(const c10::Argument& declared) {
    static const auto generator = c10::GeneratorType::get();
    return declared.type()->isSubtypeOf(*c10::OptionalType::create(generator));
  }

  at::Tensor host(const at::Tensor& tensor, bool is_index = false) {
    if (!tensor.defined()) {
      return tensor;
    }
    check_same_device(tensor, device_, is_index);
    if (traits_.touches_memory) {
      check_memory(tensor);
    }
    auto on_host = view_.to_host(tensor);
    if (traits_.touches_memory && is_sparse(on_host)) {
      check_sparse(on_host);
    }
    return on_host;
  }

  Traits traits_;
  c10::DeviceIndex device_;
  bool result_on_cpu_;
  HostView view_;
  bool has_generator_ = false;
};

// Lends the CPU's default generator the state that the device's would give, for one call.
class LentGenerator {
 public:
  LentGenerator(bool needed, c10::DeviceIndex device) {
    if (needed) {
      auto cpu = at::detail::getDefaultCPUGenerator();
      kept_ = cpu.clone();
      cpu.set_current_seed(draw(default_generator(device)).current_seed());
    }
  }
  ~LentGenerator() {
    if (kept_.defined()) {
      auto cpu = at::detail::getDefaultCPUGenerator();
      cpu.set_state(kept_.get_state());
    }
  }

 private:
  at::Generator kept_;
};

// A mask among indices is turned into positions, whose number the host must know.
bool has_mask(c10::ArrayRef<IValue> arguments) {
  for (const auto& value : arguments) {
    if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& index : value.toOptionalTensorList()) {
        if (index.has_value() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) {
          return true;
        }
      }
    }
  }
  return false;
}

void launch_of(const c10::OperatorHandle& op, c10::Stream stream, c10::ArrayRef<IValue> arguments) {
  std::vector<Access> accesses;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    each_in_memory(arguments[i], [&](const at::Tensor& tensor) {
      accesses.push_back(access_of(tensor, alias != nullptr && alias->isWrite()));
    });
  }
  launch(op.schema().name(), stream, accesses);
}

bool only_allocates(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  return name.rfind("aten::empty", 0) == 0 || name.rfind("aten::new_empty", 0) == 0;
}

// The results, which are known only now: new memory, or arguments that were there before.
void written_by(const c10::OperatorHandle& op, c10::Stream stream, c10::ArrayRef<IValue> results) {
  std::vector<Access> accesses;
  for (const auto& result : results) {
    each_in_memory(result, [&](const at::Tensor& tensor) { accesses.push_back(access_of(tensor, true)); });
  }
  launch(op.schema().name(), stream, accesses);
}

bool is_in_host_memory(const at::Tensor& tensor) {
  const auto keys = tensor.key_set();
  return keys.has(c10::DispatchKey::CPU) && !keys.has(c10::DispatchKey::Python) && tensor.has_storage() &&
      tensor.numel() > 0 && !tensor._is_zerotensor();
}

// Called for every operation there is, but only while races are detected.
std::unique_ptr<at::ObserverContext> touched_by_host(const at::RecordFunction& function) {
  const auto name = function.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  // A composite comes down to others, which are told as well.
  if (!op || !(op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || name->name == "aten::copy_") ||
      !traits_of(*op).touches_memory) {
    return nullptr;
  }
  std::vector<Access> accesses;
  bool on_host_alone = true;
  for (size_t i = 0; i < function.inputs().size(); ++i) {
    const auto* alias = op->schema().arguments()[i].alias_info();
    each_tensor(function.inputs()[i], [&](const at::Tensor& tensor) {
      on_host_alone = on_host_alone && (!tensor.defined() || tensor.device().is_cpu());
      if (tensor.defined() && is_in_host_memory(tensor)) {
        if (auto access = pinned_access_of(tensor, alias != nullptr && alias->isWrite())) {
          accesses.push_back(*std::move(access));
        }
      }
    });
  }
  if (on_host_alone) {
    touch_on_host(name->name, accesses);
  }
  return nullptr;
}

bool says(const c10::Error& error, const char* words) {
  return std::string_view(error.what_without_backtrace()).find(words) != std::string_view::npos;
}

// The host's kernel has failed: the same in the words of a device, where those are others.
[[noreturn]] void rethrow_as_device(const c10::Error& error, const Where& place) {
  if (says(error, "DefaultCPUAllocator: can't allocate memory")) {
    const std::string text = error.what_without_backtrace();
    const auto number = text.find_first_of("0123456789", text.find("tried to allocate"));
    throw_out_of_memory(std::stoull(text.substr(number)), place.device);
  }
  for (const char* words : {"is out of bounds for dimension", "index out of range in self", "Target "}) {
    if (says(error, words) && says(error, " out of ")) {
      throw_device_side_assert(error.what_without_backtrace());
    }
  }
  throw;
}

// The arguments of a call by name.
struct Named {
  const c10::FunctionSchema& schema;
  c10::ArrayRef<IValue> values;

  bool has(const char* name) const { return schema.argumentIndexWithName(name).has_value(); }
  const IValue& operator[](const char* name) const { return values[*schema.argumentIndexWithName(name)]; }
  bool reduces_by(const char* reduction) const { return has("reduce") && (*this)["reduce"].toStringRef() == reduction; }
};

// What CUDA refuses and the CPU does not.
void check_as_cuda(const Named& call) {
  static const std::unordered_set<std::string> kRefusing{
      "aten::addcmul", "aten::addcmul_", "aten::scatter", "aten::scatter_"};
  if (kRefusing.count(call.schema.name()) == 0) {
    return;
  }
  if (call.has("tensor1")) {
    for (const auto* name : {"self", "tensor1"}) {
      TORCH_CHECK(
          is_on_device(call[name].toTensor()),
          "CPU Scalar support for ",
          name,
          " argument is not supported when calling addcmul on emulated tensors.");
    }
    return;
  }
  const auto dtype = call["self"].toTensor().scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !call.reduces_by("multiply") || !at::isComplexType(dtype),
      "\"cuda_scatter_gather_base_kernel_func\" not implemented for '",
      dtype,
      "'");
}

// The name in CUDA's message, and for which calls it is.
struct Alert {
  const char* kernel;
  bool (*is_for)(const Named&) = [](const Named&) { return true; };
};

// Operations of which CUDA has no deterministic implementation and the CPU has, as read in PyTorch's aten/src/ATen/native. Not
// here: histc, which has a kernel of its own; replication_pad and max_pool3d, which torch.nn.functional replaces on CUDA alone;
// median after torch 2.13, whose source was not read.
void alert_as_cuda(const Named& call) {
  static const Alert kMedian{
      "median CUDA with indices output", [](auto& call) { return TORCH_VERSION_MINOR <= 13 && call.has("dim"); }};
  static const std::unordered_map<std::string, Alert> kAlerts{
      {"aten::avg_pool3d_backward", {"avg_pool3d_backward_cuda"}},
      {"aten::_adaptive_avg_pool2d_backward", {"adaptive_avg_pool2d_backward_cuda"}},
      {"aten::_adaptive_avg_pool3d_backward", {"adaptive_avg_pool3d_backward_cuda"}},
      {"aten::adaptive_max_pool2d_backward", {"adaptive_max_pool2d_backward_cuda"}},
      {"aten::fractional_max_pool2d_backward", {"fractional_max_pool2d_backward_cuda"}},
      {"aten::fractional_max_pool3d_backward", {"fractional_max_pool3d_backward_cuda"}},
      {"aten::upsample_linear1d_backward", {"upsample_linear1d_backward_out_cuda"}},
      {"aten::upsample_bilinear2d_backward", {"upsample_bilinear2d_backward_out_cuda"}},
      {"aten::_upsample_bilinear2d_aa_backward", {"upsample_bilinear2d_aa_backward_out_cuda"}},
      {"aten::upsample_bicubic2d_backward", {"upsample_bicubic2d_backward_out_cuda"}},
      {"aten::_upsample_bicubic2d_aa_backward", {"upsample_bicubic2d_aa_backward_out_cuda"}},
      {"aten::upsample_trilinear3d_backward", {"upsample_trilinear3d_backward_out_cuda"}},
      {"aten::reflection_pad1d_backward", {"reflection_pad1d_backward_out_cuda"}},
      {"aten::reflection_pad2d_backward", {"reflection_pad2d_backward_cuda"}},
      {"aten::reflection_pad3d_backward", {"reflection_pad3d_backward_out_cuda"}},
      {"aten::nll_loss2d_forward",
       {"nll_loss2d_forward_out_cuda_template", [](auto& call) { return call["reduction"].toInt() != 0; }}},
      {"aten::_ctc_loss_backward", {"ctc_loss_backward_gpu"}},
      {"aten::grid_sampler_2d_backward", {"grid_sampler_2d_backward_cuda"}},
      {"aten::grid_sampler_3d_backward", {"grid_sampler_3d_backward_cuda"}},
      {"aten::_embedding_bag_backward",
       {"embedding_bag_backward_cuda_max", [](auto& call) { return call["mode"].toInt() == 2; }}},
      {"aten::bincount", {"_bincount_cuda", [](auto& call) { return !call["weights"].isNone(); }}},
      {"aten::median", kMedian},
      {"aten::nanmedian", kMedian},
      {"aten::index_reduce", {"index_reduce_cuda"}},
      {"aten::scatter",
       {"scatter_reduce_cuda_kernel", [](auto& call) { return call.has("src") && call.reduces_by("multiply"); }}},
      {"aten::scatter_reduce", {"scatter_reduce_cuda_prod_", [](auto& call) { return call.reduces_by("prod"); }}},
      {"aten::put", {"put_"}}};
  auto name = call.schema.name();
  if (name.back() == '_') {
    name.pop_back();
  }
  if (const auto alert = kAlerts.find(name); alert != kAlerts.end() && alert->second.is_for(call)) {
    at::globalContext().alertNotDeterministic(alert->second.kernel);
  }
}

c10::DispatchKeySet host_key(c10::DispatchKeySet keys) {
  switch (keys.highestPriorityTypeId()) {
    case c10::DispatchKey::SparsePrivateUse1:
      return c10::DispatchKeySet(c10::DispatchKey::SparseCPU);
    case c10::DispatchKey::SparseCsrPrivateUse1:
      return c10::DispatchKeySet(c10::DispatchKey::SparseCsrCPU);
    default:
      return c10::DispatchKeySet(c10::DispatchKey::CPU);
  }
}

// waits: the operation returns a value or a size to the host, so the host waits for the stream.
template <bool waits>
void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto& declared = op.schema().arguments();
  const auto begin = stack->size() - declared.size();
  const auto arguments = c10::ArrayRef<IValue>(*stack).slice(begin);
  const auto place = where(arguments);
  const auto stream = current_stream(place.device);
  const Named named{op.schema(), arguments};
  check_as_cuda(named);
  if (at::globalContext().deterministicAlgorithms()) {
    alert_as_cuda(named);
  }
  waits || has_mask(arguments) ? synchronize(stream) : before_kernel(stream);
  if (detects_races() && traits_of(op).touches_memory) {
    launch_of(op, stream, arguments);
  }
  Call call(op, place);
  if (declared.size() > 1 && arguments[0].isTensor() && arguments[1].isOptionalTensorList()) {
    check_indices(arguments[0].toTensor(), arguments[1].toOptionalTensorList());
  }
  for (size_t i = 0; i < declared.size(); ++i) {
    auto& value = (*stack)[begin + i];
    value = call.argument(value, declared[i]);
  }
  try {
    const LentGenerator lent(call.draws_from_the_cpu(), place.device);
    const at::AutoDispatchBelowAutograd below;
    op.redispatchBoxed(host_key(keys), stack);
  } catch (const c10::Error& error) {
    rethrow_as_device(error, place);
  }
  call.write_back();
  if (!place.result_on_cpu) {
    const auto first = stack->size() - op.schema().returns().size();
    for (size_t i = first; i < stack->size(); ++i) {
      (*stack)[i] = call.result((*stack)[i]);
    }
    if (detects_races() && traits_of(op).touches_memory && !only_allocates(op)) {
      written_by(op, stream, c10::ArrayRef<IValue>(*stack).slice(first));
    }
  }
}

// Between devices the parts are moved first, each as a dense tensor.
void copy_sparse(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto self = torch::jit::peek(*stack, 0, 3).toTensor();
  const bool non_blocking = torch::jit::peek(*stack, 2, 3).toBool();
  auto& source = torch::jit::peek(*stack, 1, 3);
  source = source.toTensor().to(self.device(), source.toTensor().scalar_type(), non_blocking);
  is_on_device(self) ? run<false>(op, keys, stack) : op.redispatchBoxed(host_key(keys), stack);
}

// On CUDA `x.data = y` may change a tensor's device between the CPU and the accelerator; FSDP1's
// offload does it. PyTorch allows it between the backends that it knows, so not for PrivateUse1.
bool may_replace(const at::Tensor& tensor, const at::Tensor& data) {
  const auto dense = [](const at::Tensor& t) {
    return t.layout() == at::kStrided && !t.key_set().has(c10::DispatchKey::Python) && !t.is_meta();
  };
  return tensor.key_set() == data.key_set() || (dense(tensor) && dense(data));
}

void record_stream_of(at::Tensor& tensor, c10::Stream stream) {
  TORCH_CHECK(stream.device_type() == kEmulated, "record_stream: ", stream, " is not a stream of an emulated device");
  record_stream(tensor.storage().data_ptr(), stream.id());
}

using Names = std::unordered_set<std::string>;

const Names kWaitsForTheHost{
    "aten::_coalesce", "aten::_local_scalar_dense", "aten::_to_sparse", "aten::_unique", "aten::_unique2", "aten::bincount",
    "aten::equal", "aten::masked_select", "aten::nonzero", "aten::repeat_interleave", "aten::unique_consecutive",
    "aten::unique_dim", "aten::unique_dim_consecutive"};

// A composite that would come down to many kernels, where the CPU has a kernel of its own for it, or to one that asks
// for the device's own.
bool whole_on_the_host(const std::string& name) {
  static const Names kWhole{"aten::conj_physical_", "aten::convolution", "aten::convolution_backward"};
  return name.rfind("aten::_foreach_", 0) == 0 || kWhole.count(name) > 0;
}

const Names kOurs{
    "aten::_foreach_copy_", "aten::_has_compatible_shallow_copy_type", "aten::copy_", "aten::histc",
    "aten::narrow_copy", "aten::native_batch_norm", "aten::native_batch_norm_backward", "aten::record_stream"};

// What is ours, and what CUDA has no kernel for either. That of the products with a reduction asks whether a gradient will
// be wanted, which a host tensor does not say.
const Names kNotForSparse{
    "aten::_pin_memory", "aten::_sparse_mm_reduce_impl", "aten::_sparse_mm_reduce_impl_backward", "aten::copy_"};

void check_layout(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      (tensor.layout() == at::kStrided || is_sparse(tensor)) && !tensor.is_quantized(),
      "the emulated device has dense and sparse tensors alone, and this one is ",
      tensor.is_quantized() ? "quantized" : c10::str(tensor.layout()));
}

// The kernel of every operation for which the CPU has one, for dense tensors or sparse ones.
void register_operations(torch::Library& library, c10::DispatchKey cpu, const Names& left_out) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) != 0 || left_out.count(name.name) > 0 || !op.has_value()) {
      continue;
    }
    const bool whole = cpu == c10::DispatchKey::CPU && whole_on_the_host(name.name);
    if (!whole && !op->hasKernelForDispatchKey(cpu)) {
      continue;
    }
    library.impl(
        c10::toString(name).c_str(),
        kWaitsForTheHost.count(name.name) > 0 ? torch::CppFunction::makeFromBoxedFunction<&run<true>>()
                                              : torch::CppFunction::makeFromBoxedFunction<&run<false>>());
  }
}

void register_sparse(c10::DispatchKey device, c10::DispatchKey cpu) {
  auto* aten = new torch::Library(torch::Library::IMPL, "aten", device, __FILE__, __LINE__);
  register_operations(*aten, cpu, kNotForSparse);
  aten->impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy_sparse>());
}

} // namespace

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  run<false>(op, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stack);
}

void check_memory(const at::Tensor& tensor) {
  if (is_sparse(tensor)) {
    for (const auto& part : parts_of(tensor)) {
      check_memory(part);
    }
    return;
  }
  if (tensor.numel() == 0 || tensor.device().type() != kEmulated) {
    return;
  }
  const auto needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
  TORCH_CHECK(
      tensor.storage().nbytes() >= needed,
      "emulated error: an illegal memory access was encountered (the tensor needs ",
      needed,
      " bytes, its storage has ",
      tensor.storage().nbytes(),
      ")");
}

void watch_host(bool on) {
  static at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
  if (handle != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(std::exchange(handle, at::INVALID_CALLBACK_HANDLE));
  }
  if (on) {
    handle = at::addGlobalCallback(
        at::RecordFunctionCallback(&touched_by_host).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
}

c10::Storage HostView::to_host(const c10::Storage& storage) {
  if (storage.device_type() != kEmulated) {
    return storage;
  }
  for (const auto& [device, host] : storages_) {
    if (device.is_alias_of(storage)) {
      return host;
    }
  }
  storages_.emplace_back(storage, host_storage_on(storage));
  return storages_.back().second;
}

at::Tensor HostView::to_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kEmulated) {
    return tensor;
  }
  check_layout(tensor);
  // One tensor that is given twice is one on the host: kernels ask whether what they write is what they read.
  for (const auto& [own, host] : is_sparse(tensor) ? sparse_ : tensors_) {
    if (own.is_same(tensor)) {
      return host;
    }
  }
  if (is_sparse(tensor)) {
    Parts hosts;
    for (const auto& part : parts_of(tensor)) {
      hosts.push_back(to_host(part));
    }
    sparse_.emplace_back(tensor, sparse_tensor(hosts, tensor));
    return sparse_.back().second;
  }
  tensors_.emplace_back(tensor, new_tensor(to_host(tensor.storage()), c10::DispatchKey::CPU, tensor));
  return tensors_.back().second;
}

at::Tensor HostView::to_device(const at::Tensor& host, c10::DeviceIndex device) {
  if (!host.defined() || !host.device().is_cpu()) {
    return host;
  }
  check_layout(host);
  for (const auto& [own, its_host] : is_sparse(host) ? sparse_ : tensors_) {
    if (its_host.is_same(host)) {
      return own;
    }
  }
  if (is_sparse(host)) {
    return sparse_tensor(device_parts(host, device), host);
  }
  auto storage = device_storage(host.storage(), device);
  for (const auto& [own, _] : tensors_) {
    if (own.storage().is_alias_of(storage)) {
      return view_of(own, host);
    }
  }
  return new_tensor(std::move(storage), c10::DispatchKey::PrivateUse1, host);
}

Parts HostView::device_parts(const at::Tensor& host, c10::DeviceIndex device) {
  Parts own;
  for (const auto& part : parts_of(host)) {
    own.push_back(to_device(part, device));
  }
  return own;
}

c10::Storage HostView::device_storage(const c10::Storage& host, c10::DeviceIndex device) {
  for (const auto& [own, its_host] : storages_) {
    if (its_host.is_alias_of(host)) {
      return own;
    }
  }
  c10::Storage own(
      c10::Storage::use_byte_size_t(), host.nbytes(), adopted(host, device), device_allocator(), /*resizable=*/true);
  storages_.emplace_back(own, host);
  return own;
}

void HostView::write_back(c10::DeviceIndex device) {
  for (const auto& [own, host] : storages_) {
    if (own.data() != host.data() || own.nbytes() != host.nbytes()) {
      own.set_data_ptr_noswap(adopted(host, own.device().index()));
      own.set_nbytes(host.nbytes());
    }
  }
  for (const auto& [own, host] : tensors_) {
    auto* impl = own.unsafeGetTensorImpl();
    auto storage = device_storage(host.storage(), device);
    if (!storage.is_alias_of(own.storage())) {
      impl->set_storage_keep_dtype(std::move(storage));
    }
    if (own.sizes() != host.sizes() || own.strides() != host.strides() ||
        own.storage_offset() != host.storage_offset()) {
      impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }
  for (const auto& [own, host] : sparse_) {
    const auto parts = device_parts(host, device), before = parts_of(own);
    const auto same = [](const at::Tensor& one, const at::Tensor& other) { return one.is_same(other); };
    if (!same_shape(own, host) || !std::equal(parts.begin(), parts.end(), before.begin(), same)) {
      set_parts(own, parts, host);
    }
  }
}

void register_kernels() {
  static auto* everything =
      new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  everything->fallback(torch::CppFunction::makeFromBoxedFunction<&run<false>>());

  // A backend's fallback comes after the composite kernels of PyTorch, which would take an operation
  // apart, or compute into an `out=` of their own making, where the CPU has one kernel for it.
  static auto* aten =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  register_operations(*aten, c10::DispatchKey::CPU, kOurs);
  register_sparse(c10::DispatchKey::SparsePrivateUse1, c10::DispatchKey::SparseCPU);
  register_sparse(c10::DispatchKey::SparseCsrPrivateUse1, c10::DispatchKey::SparseCsrCPU);
  aten->impl("copy_", TORCH_FN(copy_));
  aten->impl("_has_compatible_shallow_copy_type", TORCH_FN(may_replace));
  aten->impl("record_stream", TORCH_FN(record_stream_of));
  register_cuda_kernels(*aten);

  // Composites whose kernel here comes before autograd's and before a tensor subclass's, as they do.
  static auto* composite =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  composite->impl("_has_compatible_shallow_copy_type", TORCH_FN(may_replace));
  register_attention(*aten, *composite);
}

} // namespace emulated

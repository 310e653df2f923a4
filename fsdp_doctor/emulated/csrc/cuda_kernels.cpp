#define AT_PER_OPERATOR_HEADERS // TensorOperators.h would include every operation there is
#include "cuda_kernels.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros_like.h>

#include <tuple>
#include <vector>

#include "fallback.h"
#include "streams.h"

namespace emulated {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Mixture-of-experts models count their tokens with histograms of integers.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  if (self.is_floating_point()) {
    at::globalContext().alertNotDeterministic("_histc_cuda with floating point input");
  }
  HostView view;
  before_kernel(current_stream(self.device().index()));
  const at::AutoDispatchBelowAutograd below;
  check_memory(self);
  const auto values = view.to_host(self);
  const bool integral = at::isIntegralType(self.scalar_type(), /*includeBool=*/false);
  const auto counts = at::histc(integral ? values.to(at::kDouble) : values, bins, min, max);
  return view.to_device(counts.to(self.scalar_type()), self.device().index());
}

// The CPU's own kernel has other errors.
Tensor narrow_copy(const Tensor& self, int64_t dim, int64_t start, int64_t length) {
  return self.narrow(dim, start, length).clone(at::MemoryFormat::Contiguous);
}

bool is_given(const MaybeTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

Tensor biased(const Tensor& gates, const MaybeTensor& bias) {
  return is_given(bias) ? gates + *bias : gates;
}

// The workspace is the gates after their activation: input, forget, cell, output.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& cx,
    const MaybeTensor& input_bias,
    const MaybeTensor& hidden_bias) {
  const auto gates = biased(hidden_gates, hidden_bias).add(biased(input_gates, input_bias)).unsafe_chunk(4, 1);
  const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  const auto cy = (forget * cx).add_(in * cell);
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

Tensor through_sigmoid(const Tensor& grad, const Tensor& activated) {
  return grad * activated * (1 - activated);
}

Tensor through_tanh(const Tensor& grad, const Tensor& activated) {
  return grad * (1 - activated * activated);
}

Tensor of_bias(const Tensor& grad, bool has_bias) {
  return has_bias ? grad.sum(0, /*keepdim=*/false) : Tensor();
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const MaybeTensor& grad_hy,
    const MaybeTensor& grad_cy,
    const Tensor& cx,
    const Tensor& cy,
    const Tensor& workspace,
    bool has_bias) {
  if (!is_given(grad_hy) && !is_given(grad_cy)) {
    return {};
  }
  const auto gates = workspace.unsafe_chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const auto visible = cy.tanh();
  const auto of_hy = is_given(grad_hy) ? *grad_hy : at::zeros_like(cy);
  auto of_cy = through_tanh(of_hy * out, visible);
  of_cy = is_given(grad_cy) ? of_cy + *grad_cy : of_cy;
  const auto of_gates = at::cat(
      {through_sigmoid(of_cy * cell, in),
       through_sigmoid(of_cy * cx, forget),
       through_tanh(of_cy * in, cell),
       through_sigmoid(of_hy * visible, out)},
      1);
  return {of_gates, of_cy * forget, of_bias(of_gates, has_bias)};
}

// The workspace: reset, update and new gate after their activation, the hidden state, the new gate's hidden part.
std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& hx,
    const MaybeTensor& input_bias,
    const MaybeTensor& hidden_bias) {
  const auto inputs = biased(input_gates, input_bias).unsafe_chunk(3, 1);
  const auto hidden = biased(hidden_gates, hidden_bias).unsafe_chunk(3, 1);
  const auto reset = hidden[0].add(inputs[0]).sigmoid_();
  const auto update = hidden[1].add(inputs[1]).sigmoid_();
  const auto fresh = inputs[2].add(hidden[2] * reset).tanh_();
  const auto hy = (hx - fresh).mul_(update).add_(fresh);
  return {hy, at::cat({reset, update, fresh, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy,
    const Tensor& workspace,
    bool has_bias) {
  const auto kept = workspace.unsafe_chunk(5, 1);
  const auto &reset = kept[0], &update = kept[1], &fresh = kept[2], &hx = kept[3], &hidden = kept[4];
  const auto of_update = through_sigmoid(grad_hy * (hx - fresh), update);
  const auto of_fresh = through_tanh(grad_hy * (1 - update), fresh);
  const auto of_reset = through_sigmoid(of_fresh * hidden, reset);
  const auto of_inputs = at::cat({of_reset, of_update, of_fresh}, 1);
  const auto of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {
      of_inputs, of_hidden, grad_hy * update, of_bias(of_inputs, has_bias), of_bias(of_hidden, has_bias)};
}

// Batch norm over several ranks. Statistics are in float32 for the half precisions, as CUDA's.

Tensor wide(const Tensor& tensor) {
  return at::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}

std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) {
    dims.push_back(dim);
  }
  return dims;
}

Tensor per_channel(const Tensor& values, const Tensor& like) {
  std::vector<int64_t> shape(like.dim(), 1);
  shape[1] = values.numel();
  return values.view(shape);
}

std::tuple<Tensor, Tensor> stats(const Tensor& input, double eps) {
  auto [variance, mean] = at::var_mean(wide(input), all_but_channels(input), /*unbiased=*/false);
  return {mean, (variance + eps).rsqrt()};
}

Tensor elemt(
    const Tensor& input,
    const MaybeTensor& weight,
    const MaybeTensor& bias,
    const Tensor& mean,
    const Tensor& invstd,
    double /*eps*/) {
  auto result = (wide(input) - per_channel(mean, input)) * per_channel(invstd, input);
  result = is_given(weight) ? result * per_channel(wide(*weight), input) : result;
  result = is_given(bias) ? result + per_channel(wide(*bias), input) : result;
  return result.to(input.scalar_type());
}

Tensor& elemt_out(
    const Tensor& input,
    const MaybeTensor& weight,
    const MaybeTensor& bias,
    const Tensor& mean,
    const Tensor& invstd,
    double eps,
    Tensor& out) {
  return out.copy_(elemt(input, weight, bias, mean, invstd, eps));
}

void update(const MaybeTensor& running, const Tensor& now, double momentum) {
  if (is_given(running)) {
    running->mul_(1 - momentum).add_(now.to(running->scalar_type()), momentum);
  }
}

std::tuple<Tensor, Tensor> gather_stats_with_counts(
    const Tensor& /*input*/,
    const Tensor& means,
    const Tensor& invstds,
    const MaybeTensor& running_mean,
    const MaybeTensor& running_var,
    double momentum,
    double eps,
    const Tensor& counts) {
  const auto weights = counts.to(means.scalar_type()).view({-1, 1});
  const auto total = weights.sum();
  const auto mean = (means * weights).sum(0) / total;
  const auto variances = invstds.pow(-2) - eps;
  const auto spread = ((variances + (means - mean).pow(2)) * weights).sum(0);
  update(running_mean, mean, momentum);
  update(running_var, spread / (total - 1), momentum);
  return {mean, (spread / total + eps).rsqrt()};
}

std::tuple<Tensor, Tensor> gather_stats(
    const Tensor& input,
    const Tensor& means,
    const Tensor& invstds,
    const MaybeTensor& running_mean,
    const MaybeTensor& running_var,
    double momentum,
    double eps,
    int64_t count) {
  const auto counts = at::full({means.size(0)}, count, means.options());
  return gather_stats_with_counts(input, means, invstds, running_mean, running_var, momentum, eps, counts);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_reduce(
    const Tensor& grad,
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const MaybeTensor& weight,
    bool for_input,
    bool for_weight,
    bool for_bias) {
  const auto dims = all_but_channels(input);
  const auto sum_dy = wide(grad).sum(dims);
  const auto sum_dy_xmu = (wide(grad) * (wide(input) - per_channel(mean, input))).sum(dims);
  const auto dtype = is_given(weight) ? weight->scalar_type() : mean.scalar_type();
  return {
      for_input ? sum_dy : Tensor(),
      for_input ? sum_dy_xmu : Tensor(),
      for_weight ? (sum_dy_xmu * invstd).to(dtype) : Tensor(),
      for_bias ? sum_dy.to(dtype) : Tensor()};
}

Tensor backward_elemt(
    const Tensor& grad,
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const MaybeTensor& weight,
    const Tensor& sum_dy,
    const Tensor& sum_dy_xmu,
    const Tensor& counts) {
  const auto total = counts.sum().to(sum_dy.scalar_type());
  const auto along = (sum_dy_xmu / total) * invstd * invstd;
  auto scale = is_given(weight) ? invstd * wide(*weight) : invstd;
  const auto centered = wide(grad) - per_channel(sum_dy / total, input) -
      (wide(input) - per_channel(mean, input)) * per_channel(along, input);
  return (centered * per_channel(scale, input)).to(input.scalar_type());
}

// Whether the channels of an element lie beside one another, which CUDA has kernels of their own for.
bool is_channels_last(const Tensor& input) {
  return input.is_contiguous(at::MemoryFormat::ChannelsLast) ||
      input.is_contiguous(at::MemoryFormat::ChannelsLast3d) || (input.is_contiguous() && input.stride(1) == 1);
}

// Weights in half precision beside buffers in float32, which the CPU's batch norm refuses: its kernel gets the
// weights in float32, and their gradients go back to the dtype of the weights.
void batch_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& declared = op.schema().arguments();
  const auto begin = stack->size() - declared.size();
  auto argument = [&](const char* name) -> c10::IValue* {
    const auto index = op.schema().argumentIndexWithName(name);
    return index.has_value() ? &(*stack)[begin + *index] : nullptr;
  };
  const auto* buffer = argument("running_mean");
  auto narrow = at::kFloat;
  if (buffer->isTensor() && buffer->toTensor().scalar_type() == at::kFloat) {
    for (const char* name : {"weight", "bias"}) {
      auto* value = argument(name);
      if (value != nullptr && value->isTensor() && at::isReducedFloatingType(value->toTensor().scalar_type())) {
        narrow = value->toTensor().scalar_type();
        *value = value->toTensor().to(at::kFloat);
      }
    }
  }
  const bool is_backward = op.schema().argumentIndexWithName("grad_out").has_value();
  const auto& input = argument("input")->toTensor();
  // CUDA's other kernel for gradients has one dtype for weights and buffers.
  TORCH_CHECK(
      narrow == at::kFloat || !is_backward || narrow != input.scalar_type() || is_channels_last(input),
      "Expected running_mean to have type ",
      narrow,
      " but got Float");
  run_on_host(op, stack);
  if (narrow != at::kFloat && is_backward) {
    for (auto result = stack->end() - 2; result != stack->end(); ++result) {
      if (result->isTensor() && result->toTensor().defined()) {
        *result = result->toTensor().to(narrow);
      }
    }
  }
}

} // namespace

void register_cuda_kernels(torch::Library& kernels) {
  kernels.impl("histc", TORCH_FN(histc));
  kernels.impl("narrow_copy", TORCH_FN(narrow_copy));
  kernels.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  kernels.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  kernels.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  kernels.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
  kernels.impl("batch_norm_stats", TORCH_FN(stats));
  kernels.impl("batch_norm_elemt", TORCH_FN(elemt));
  kernels.impl("batch_norm_elemt.out", TORCH_FN(elemt_out));
  kernels.impl("batch_norm_gather_stats", TORCH_FN(gather_stats));
  kernels.impl("batch_norm_gather_stats_with_counts", TORCH_FN(gather_stats_with_counts));
  kernels.impl("batch_norm_backward_reduce", TORCH_FN(backward_reduce));
  kernels.impl("batch_norm_backward_elemt", TORCH_FN(backward_elemt));
  for (const char* name : {"native_batch_norm", "native_batch_norm_backward"}) {
    kernels.impl(name, torch::CppFunction::makeFromBoxedFunction<&batch_norm>());
  }
}

} // namespace emulated

#include "attention.h"

#include <ATen/SDPBackend.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/ops/zeros_like.h>

#include <array>
#include <limits>
#include <tuple>

namespace emulated {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Asked of the CPU's kernel itself: a subclass of Tensor need not know the question. Its fused kernel has no gradient
// for the mask.
bool is_fused(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const MaybeTensor& mask,
    double dropout,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
  return !(mask.has_value() && mask->requires_grad()) &&
      at::_ops::_fused_sdp_choice::redispatch(
          c10::DispatchKeySet(c10::DispatchKey::CPU), query, key, value, mask, dropout, is_causal, scale, enable_gqa) ==
      static_cast<int64_t>(at::SDPBackend::flash_attention);
}

Tensor as_bias(const Tensor& mask, const Tensor& query) {
  if (mask.scalar_type() != at::kBool) {
    return mask;
  }
  return at::zeros_like(mask, query.options())
      .masked_fill_(mask.logical_not(), -std::numeric_limits<double>::infinity());
}

// PyTorch asks each device that it knows how it wants to attend, and takes the plain way for others.
Tensor attention(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const MaybeTensor& mask,
    double dropout,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
  if (!is_fused(query, key, value, mask, dropout, is_causal, scale, enable_gqa)) {
    return at::native::scaled_dot_product_attention(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
  }
  if (mask.has_value() && mask->defined()) {
    return std::get<0>(at::_scaled_dot_product_efficient_attention(
        query, key, value, as_bias(*mask, query), /*compute_log_sumexp=*/true, dropout, is_causal, scale));
  }
  return std::get<0>(at::_scaled_dot_product_flash_attention(
      query, key, value, dropout, is_causal, /*return_debug_mask=*/false, scale));
}

// What CUDA's kernels keep of the random numbers that they drew; nothing is drawn here.
Tensor no_random_state(const Tensor& query) {
  return at::empty({}, query.options().dtype(at::kLong));
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    double dropout,
    bool is_causal,
    bool /*return_debug_mask*/,
    std::optional<double> scale) {
  auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, {}, scale);
  return {
      output,
      logsumexp,
      Tensor(),
      Tensor(),
      query.sym_size(2),
      key.sym_size(2),
      no_random_state(query),
      no_random_state(query),
      at::empty({0}, query.options())};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& grad,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& output,
    const Tensor& logsumexp,
    const Tensor& /*cum_seq_q*/,
    const Tensor& /*cum_seq_k*/,
    c10::SymInt /*max_q*/,
    c10::SymInt /*max_k*/,
    double dropout,
    bool is_causal,
    const Tensor& /*philox_seed*/,
    const Tensor& /*philox_offset*/,
    std::optional<double> scale) {
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, query, key, value, output, logsumexp, dropout, is_causal, {}, scale);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const MaybeTensor& bias,
    bool /*compute_log_sumexp*/,
    double dropout,
    bool is_causal,
    std::optional<double> scale) {
  auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, bias, scale);
  return {output, logsumexp, no_random_state(query), no_random_state(query)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& bias,
    const Tensor& output,
    const Tensor& logsumexp,
    const Tensor& /*philox_seed*/,
    const Tensor& /*philox_offset*/,
    double dropout,
    std::array<bool, 4> mask,
    bool is_causal,
    std::optional<double> scale) {
  TORCH_CHECK(!mask[3], "the emulated device's fused attention has no gradient for the bias");
  const auto given = bias.defined() ? MaybeTensor(bias) : MaybeTensor();
  auto [for_query, for_key, for_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, query, key, value, output, logsumexp, dropout, is_causal, given, scale);
  return {for_query, for_key, for_value, Tensor()};
}

} // namespace

void register_attention(torch::Library& kernels, torch::Library& composites) {
  kernels.impl("_scaled_dot_product_flash_attention", TORCH_FN(flash));
  kernels.impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
  kernels.impl("_scaled_dot_product_efficient_attention", TORCH_FN(efficient));
  kernels.impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(efficient_backward));
  composites.impl("scaled_dot_product_attention", TORCH_FN(attention));
}

} // namespace emulated

#include "copy.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>

#include <cstring>

#include "fallback.h"
#include "memory.h"
#include "streams.h"

namespace emulated {
namespace {

bool is_emulated(const at::Tensor& tensor) {
  return tensor.device().type() == kEmulated;
}

void copy_within(at::Tensor& self, const at::Tensor& source) {
  if (detects_races()) {
    const auto stream = current_stream(source.device().index());
    if (const auto clock = clock_of(current_stream(self.device().index())); self.device() != source.device()) {
      follow(stream, *clock);
    }
    launch("copy_", stream, {access_of(source, false), access_of(self, true)});
    if (self.device() != source.device()) {
      follow(current_stream(self.device().index()), *clock_of(stream));
    }
  }
  before_kernel(current_stream(source.device().index()));
  before_kernel(current_stream(self.device().index()));
  HostView view;
  view.to_host(self).copy_(view.to_host(source));
}

// One range of bytes on either side, in the same order.
bool is_one_piece(const at::Tensor& self, const at::Tensor& source) {
  if (self.dtype() != source.dtype() || self.is_conj() != source.is_conj() || self.is_neg() != source.is_neg()) {
    return false;
  }
  return (self.is_contiguous() && source.is_contiguous()) ||
      (self.is_non_overlapping_and_dense() && self.strides() == source.strides());
}

void copy_piece(const at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool to_device = is_emulated(self);
  const auto stream = current_stream((to_device ? self : source).device().index());
  const Copy copy{
      self.mutable_data_ptr(),
      source.const_data_ptr(),
      self.nbytes(),
      to_device ? device_block(self.storage().data_ptr()) : pinned_block(self.const_data_ptr()),
      to_device ? pinned_block(source.const_data_ptr()) : BlockPtr(),
  };
  if (detects_races()) {
    std::vector<Access> accesses{access_of(to_device ? self : source, to_device)};
    if (auto host = pinned_access_of(to_device ? source : self, !to_device)) {
      accesses.push_back(*std::move(host));
    }
    launch("copy_", stream, accesses);
  }
  const bool pinned = static_cast<bool>(to_device ? copy.keeps_from : copy.keeps_to);
  if (non_blocking && pinned) {
    to_device ? copy_to_device(stream, copy) : copy_to_host(stream, copy);
    return;
  }
  // From pageable memory the bytes are taken before the call returns, and the host does not wait for
  // the stream; to pageable memory it does (CUDA's "API synchronization behavior").
  if (non_blocking && to_device) {
    before_kernel(stream);
  } else {
    synchronize(stream);
  }
  std::memcpy(copy.to, copy.from, copy.nbytes);
}

// Conversions on the CPU, other strides on the side of the source, as CUDA does it: a conversion's
// copy is pageable, so it is not late.
void copy_between(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (is_one_piece(self, source)) {
    copy_piece(self, source, non_blocking);
    return;
  }
  const auto wanted = is_emulated(self) ? source.to(self.dtype()) : source;
  auto target = self.is_contiguous() && self.dtype() == wanted.dtype() && !self.is_conj() && !self.is_neg()
      ? self
      : at::empty_like(self, self.options().dtype(wanted.dtype()), at::MemoryFormat::Contiguous);
  const auto flat = wanted.contiguous().resolve_conj().resolve_neg();
  copy_piece(target, flat, non_blocking);
  if (!target.is_same(self)) {
    self.copy_(target, non_blocking);
  }
}

} // namespace

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  TORCH_CHECK(self.defined(), "self is undefined");
  TORCH_CHECK(source.defined(), "src is undefined");
  if (self.is_same(source)) {
    return self;
  }
  TORCH_CHECK(
      !self._is_zerotensor(),
      "ZeroTensors are immutable. Please materialize the tensor using `.clone()`, if you want a mutable zero tensor.");
  const auto shape = at::infer_size(self.sizes(), source.sizes());
  TORCH_CHECK(
      self.sizes() == shape,
      "output with shape ",
      self.sizes(),
      " doesn't match the broadcast shape ",
      at::IntArrayRef(shape));
  const at::AutoDispatchBelowAutograd below;
  if (self.numel() == 0) {
    return self;
  }
  if (source._is_zerotensor()) {
    return self.zero_();
  }
  check_memory(self);
  check_memory(source);
  const auto expanded = source.expand(shape);
  if (is_emulated(self) && is_emulated(source)) {
    copy_within(self, expanded);
  } else {
    copy_between(self, expanded, non_blocking);
  }
  return self;
}

} // namespace emulated

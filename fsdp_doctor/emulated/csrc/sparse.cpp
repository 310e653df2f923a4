#define AT_PER_OPERATOR_HEADERS // TensorOperators.h would include every operation there is
#include "sparse.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/aminmax.h>
#include <c10/core/DeviceGuard.h>

namespace emulated {
namespace {

at::SparseTensorImpl& coo(const at::Tensor& tensor) {
  return *static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

at::SparseCsrTensorImpl& compressed(const at::Tensor& tensor) {
  return *static_cast<at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
}

c10::DispatchKeySet keys_of(c10::Layout layout, bool on_cpu) {
  if (layout == at::kSparse) {
    return c10::DispatchKeySet(on_cpu ? c10::DispatchKey::SparseCPU : c10::DispatchKey::SparsePrivateUse1);
  }
  return c10::DispatchKeySet(on_cpu ? c10::DispatchKey::SparseCsrCPU : c10::DispatchKey::SparseCsrPrivateUse1);
}

std::optional<int64_t> outside(const at::Tensor& indices, int64_t size) {
  if (indices.numel() > 0) {
    const auto [least, most] = at::aminmax(indices);
    for (const auto index : {least.item().toLong(), most.item().toLong()}) {
      if (index < 0 || index >= size) {
        return index;
      }
    }
  }
  return std::nullopt;
}

} // namespace

bool is_sparse(const at::Tensor& tensor) {
  switch (tensor.layout()) {
    case at::kSparse:
    case at::kSparseCsr:
    case at::kSparseCsc:
    case at::kSparseBsr:
    case at::kSparseBsc:
      return true;
    default:
      return false;
  }
}

Parts parts_of(const at::Tensor& tensor) {
  if (!is_sparse(tensor)) {
    return {tensor};
  }
  if (tensor.layout() == at::kSparse) {
    return {coo(tensor).indices(), coo(tensor).values()};
  }
  const auto& impl = compressed(tensor);
  return {impl.compressed_indices(), impl.plain_indices(), impl.values()};
}

at::Tensor sparse_tensor(const Parts& parts, const at::Tensor& like) {
  const auto layout = like.layout();
  const auto device = parts.back().device();
  const auto keys = keys_of(layout, device.is_cpu());
  const c10::DeviceGuard guard(device); // a new COO tensor is on the current device
  auto tensor = layout == at::kSparse
      ? at::detail::make_tensor<at::SparseTensorImpl>(keys, like.dtype())
      : at::detail::make_tensor<at::SparseCsrTensorImpl>(keys, device, layout, like.dtype());
  set_parts(tensor, parts, like);
  return tensor;
}

void set_parts(const at::Tensor& sparse, const Parts& parts, const at::Tensor& like) {
  if (sparse.layout() != at::kSparse) {
    compressed(sparse).set_member_tensors(parts[0], parts[1], parts[2], like.sizes());
    return;
  }
  auto& impl = coo(sparse);
  impl.raw_resize_(coo(like).sparse_dim(), coo(like).dense_dim(), like.sizes());
  impl.set_indices_and_values_unsafe(parts[0], parts[1]);
  impl.set_coalesced(coo(like).coalesced());
}

std::optional<int64_t> stray_index(const at::Tensor& sparse) {
  const auto parts = parts_of(sparse);
  if (sparse.layout() == at::kSparse) {
    for (int64_t dim = 0; dim < parts[0].size(0); ++dim) {
      if (const auto index = outside(parts[0][dim], sparse.size(dim))) {
        return index;
      }
    }
    return std::nullopt;
  }
  const auto &compressed = parts[0], &plain = parts[1], &values = parts[2];
  if (plain.numel() == 0) {
    return std::nullopt; // what is new may have any compressed indices
  }
  const bool by_row = sparse.layout() == at::kSparseCsr || sparse.layout() == at::kSparseBsr;
  const bool blocks = sparse.layout() == at::kSparseBsr || sparse.layout() == at::kSparseBsc;
  const auto dim = compressed.dim() - 1; // of the rows: the dimensions before it are those of a batch
  const auto of_plain = by_row ? 1 : 0;
  const auto index = outside(plain, sparse.size(dim + of_plain) / (blocks ? values.size(dim + 1 + of_plain) : 1));
  return index.has_value() ? index : outside(compressed, plain.size(-1) + 1);
}

bool same_shape(const at::Tensor& sparse, const at::Tensor& other) {
  if (sparse.layout() != at::kSparse) {
    return sparse.sizes() == other.sizes();
  }
  const auto &one = coo(sparse), &two = coo(other);
  return sparse.sizes() == other.sizes() && one.sparse_dim() == two.sparse_dim() &&
      one.dense_dim() == two.dense_dim() && one.coalesced() == two.coalesced();
}

} // namespace emulated

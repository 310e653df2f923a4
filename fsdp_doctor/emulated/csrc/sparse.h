// A sparse tensor is a few dense ones, its indices and its values; what it is beside them lies on the host.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/util/SmallVector.h>

#include <optional>

namespace emulated {

using Parts = c10::SmallVector<at::Tensor, 3>;

bool is_sparse(const at::Tensor& tensor);

// The dense tensors of a sparse one: its own, not copies. A dense tensor is its only part.
Parts parts_of(const at::Tensor& tensor);

// A sparse tensor of these parts on their device; all else is that of `like`.
at::Tensor sparse_tensor(const Parts& parts, const at::Tensor& like);

// Gives a sparse tensor these parts, and the sizes of `like`, which is of the same layout.
void set_parts(const at::Tensor& sparse, const Parts& parts, const at::Tensor& like);

// The first index of a sparse tensor on the host that lies outside of it, if any: the host's kernels do not look.
std::optional<int64_t> stray_index(const at::Tensor& sparse);

// Whether two of the same layout are alike in all but their parts.
bool same_shape(const at::Tensor& sparse, const at::Tensor& other);

} // namespace emulated

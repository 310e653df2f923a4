"""Product of an adapter's two factors, which is added to a weight during its transfer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Delta:
    """Contribution of one adapter to one weight: ``scaling * B @ A``, or its transpose.

    a, b: the factors, of shape (r, in) and (out, r), both whole and on the device.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    transposed: bool

    def compute_part(self, start: int, numel: int) -> torch.Tensor:
        """Computes the elements [start, start + numel) of the flattened product, 1-D."""
        left, right = (self.a.t(), self.b.t()) if self.transposed else (self.b, self.a)
        columns = right.shape[1]
        first, last = start // columns, -(-(start + numel) // columns)
        rows = (left[first:last] @ right) * self.scaling
        skipped = start - first * columns
        return rows.reshape(-1)[skipped : skipped + numel]

    def block(self, rows: slice, columns: slice) -> torch.Tensor:
        """Computes the block of the product with these rows and columns."""
        left, right = (self.a.t(), self.b.t()) if self.transposed else (self.b, self.a)
        return (left[rows] @ right[:, columns]) * self.scaling

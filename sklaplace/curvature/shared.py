"""Jacobian rows of a last layer with many outputs, if all samples share ``S``.

``S`` is a (c, c) matrix for ``c`` outputs: the identity, or a centring matrix. For the
head of a language model, ``S`` would need gigabytes of memory, but products with ``S``
are only sums.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.parallel import cached_property
from sklaplace.curvature.rows import BaseBlock, Block

# Maximum number of outputs for a dense (c, c) matrix, which takes 8 MiB in float64.
MAX_DENSE_OUTPUTS = 1024


@dataclass(frozen=True)
class IdentityMap:
    """Identity (n, n): the layer's outputs are the network's outputs."""

    n: int

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return self.n, self.n

    def to(self, *_: object) -> "IdentityMap":
        """Return the map itself, which has no dtype or device."""
        return self


@dataclass(frozen=True, eq=False)
class SharedColumns:
    """``S = I`` or ``I - 11ᵀ/K`` of shape (1, n, 1, n), formed only if needed.

    Attributes
    ----------
    n : int
        Number of outputs.
    n_blocks : int
        Number of consecutive groups of K outputs. The mean of each group is subtracted.
        Zero means no centring.
    like : Tensor of shape ()
        Tensor with the dtype and device of ``S``.
    """

    n: int
    n_blocks: int
    like: Tensor

    def __len__(self) -> int:
        """Return one, because all samples share ``S``."""
        return 1

    @property
    def dtype(self) -> torch.dtype:
        """Data type of ``S``."""
        return self.like.dtype

    @cached_property
    def dense(self) -> Tensor:
        """Dense ``S``, (1, n, 1, n)."""
        return self @ torch.eye(self.n).to(self.like)

    def __matmul__(self, matrix: Tensor) -> Tensor:
        """Return ``S Q`` for a matrix (n, n), as (1, n, 1, n)."""
        return self.times(matrix).reshape(1, self.n, 1, self.n)

    @cached_property
    def _doubled(self) -> "SharedColumns":
        return SharedColumns(self.n, self.n_blocks, self.like.double())

    def double(self) -> "SharedColumns":
        """Return ``S`` in float64, which is always the same object."""
        return self._doubled

    def times(self, values: Tensor) -> Tensor:
        """Return ``S v`` for values (..., n, q): subtract the mean of each group."""
        if not self.n_blocks:
            return values
        groups = values.unflatten(-2, (self.n_blocks, -1))
        return (groups - groups.mean(-2, keepdim=True)).flatten(-3, -2)

    def propagated_variances(self, v: Tensor) -> Tensor:
        """Return variances ``Σₒ S²ₖₒ vₒ`` of network outputs, (b, n).

        ``v`` (b, n) are the variances of independent layer outputs.
        Within a group of K outputs, the squared entries of ``S = I - 11ᵀ/K`` are
        ``1 - 2/K + 1/K²`` on the diagonal, and ``1/K²`` elsewhere.
        """
        if not self.n_blocks:
            return v
        groups = v.unflatten(1, (self.n_blocks, -1))
        k = groups.shape[2]  # K
        # 1/K² times all outputs of a group, and then the rest of the diagonal
        common = groups.sum(2, keepdim=True) / k**2
        return torch.add(common, groups, alpha=1 - 2 / k).flatten(1)


@dataclass(frozen=True)
class SharedBlock(BaseBlock):
    """Rows ``S ⊗ a`` of a last layer; see `SharedColumns`.

    Attributes
    ----------
    columns : SharedColumns
        ``S``, shared by the blocks of the weight and the bias.
    a : Tensor of shape (b, 1, i) or None
        Layer inputs. None means ``a ≡ 1``.
    """

    columns: SharedColumns
    a: Tensor | None = None

    @property
    def g(self) -> Tensor:  # type: ignore[override]
        """Dense ``S``, (1, n, 1, n)."""
        return self.columns.dense

    @property
    def gradients(self) -> SharedColumns:
        """``S``."""
        return self.columns

    @property
    def n_columns(self) -> int:
        """Number of rows per sample."""
        return self.columns.n

    @property
    def n_outputs(self) -> int:
        """Number of outputs of the layer, equal to `n_columns`."""
        return self.columns.n

    def with_factors(self, g: Any, a: Any) -> Any:
        """Build rows for the same parameters from other factors ``g`` and ``a``."""
        return Block(g, a) if isinstance(g, Tensor) else SharedBlock(g, a)

    def rotate(self, inputs: Tensor | None) -> "SharedBlock":
        """Rotate rows into the basis ``1 ⊗ inputs``, or keep them if it is None."""
        if inputs is None or self.a is None:
            return self
        return SharedBlock(self.columns, self.a @ inputs)

    def coefficient_variances(self, v: Tensor) -> Tensor:
        """Return ``Σₒ S² v``, (n, i), for variances ``v`` (p,) of the weights."""
        return self.propagated_variances(v.reshape(self.n_outputs, -1).T).T

    def propagated_variances(self, v: Tensor) -> Tensor:
        """Return ``Σₒ S² v``, (b, n), for variances ``v`` (b, n) of layer outputs."""
        return self.columns.propagated_variances(v)

    def matmul(self, v: Tensor) -> Tensor:
        """Return ``rows @ v`` for ``v`` (p, q), as (b, n, q).

        The inputs are multiplied first, and then ``S`` is applied as a sum.
        """
        matrices = v.unflatten(0, (self.n_outputs, -1))  # (n, i, q)
        if self.a is None:
            return self.columns.times(matrices.transpose(0, 1))
        # (b, n) for each of the q columns of v
        products = [self.a.squeeze(1) @ m.T for m in matrices.unbind(2)]
        return self.columns.times(torch.stack(products, 2))

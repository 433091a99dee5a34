"""Rows of outputs themselves, or centred ones, of a last layer with many outputs.

Of ``c`` outputs they are the rows of a (c, c) matrix, the same for all samples. For a
language model's head it would take gigabytes; products with it are sums.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.parallel import cached_property
from sklaplace.curvature.blocks import BaseBlock, Block

# More outputs are not written out. A matrix of as many takes 8 MiB in float64.
MAX_DENSE = 1024


@dataclass(frozen=True)
class IdentityMap:
    """The map of a layer's outputs, (n, n), where they are the network's."""

    n: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.n, self.n

    def to(self, *_: object) -> "IdentityMap":
        """The map in another dtype, or on another device: itself."""
        return self


@dataclass(frozen=True, eq=False)
class SharedColumns:
    """``S = I``, or ``I - 11ᵀ/K``, as a tensor (1, n, 1, n) that is not written out.

    Attributes
    ----------
    n : int
        Number of outputs.
    n_blocks : int
        Number of groups of K outputs, side by side, whose means are subtracted from
        their outputs; 0 for none.
    like : Tensor of shape ()
        Has its dtype and device.
    """

    n: int
    n_blocks: int
    like: Tensor

    def __len__(self) -> int:
        """One: samples share it."""
        return 1

    @property
    def dtype(self) -> torch.dtype:
        """Data type."""
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        """Device."""
        return self.like.device

    @cached_property
    def dense(self) -> Tensor:
        """The tensor, (1, n, 1, n)."""
        return self.times(torch.eye(self.n).to(self.like)).reshape(1, self.n, 1, self.n)

    @cached_property
    def doubled(self) -> "SharedColumns":
        """The same in float64."""
        return SharedColumns(self.n, self.n_blocks, self.like.double())

    def times(self, values: Tensor) -> Tensor:
        """``S v`` for values (..., n, q)."""
        if not self.n_blocks:
            return values
        groups = values.unflatten(-2, (self.n_blocks, -1))
        return (groups - groups.mean(-2, keepdim=True)).flatten(-3, -2)

    def weighted_squares(self, weights: Tensor) -> Tensor:
        """``Σₒ S²ₖₒ wₒ`` for weights (b, n), as (b, n)."""
        if not self.n_blocks:
            return weights
        groups = weights.unflatten(1, (self.n_blocks, -1))
        k = groups.shape[2]
        means = groups.sum(2, keepdim=True) / k**2
        return torch.add(means, groups, alpha=1 - 2 / k).flatten(1)


@dataclass(frozen=True)
class SharedBlock(BaseBlock):
    """Rows ``S ⊗ a`` of a last layer, see `SharedColumns`.

    Attributes
    ----------
    columns : SharedColumns
        ``S``, which the blocks of weight and bias share.
    a : Tensor of shape (b, 1, i) or None
        Layer inputs. None stands for ``a ≡ 1``.
    """

    columns: SharedColumns
    a: Tensor | None = None

    @property
    def g(self) -> Tensor:  # type: ignore[override]
        """``S`` written out, (1, n, 1, n)."""
        return self.columns.dense

    @property
    def outputs(self) -> SharedColumns:
        """``S``."""
        return self.columns

    @property
    def n_columns(self) -> int:
        """Number of rows for each sample."""
        return self.columns.n

    @property
    def n_outputs(self) -> int:
        """Outputs of the layer, as many."""
        return self.columns.n

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.columns.device

    def like(self, g: Any, a: Any) -> Any:
        """Rows of the same parameters from other factors."""
        return Block(g, a) if isinstance(g, Tensor) else SharedBlock(g, a)

    def double(self) -> "SharedBlock":
        """Rows in float64."""
        a = None if self.a is None else self.a.double()
        return SharedBlock(self.columns.doubled, a)

    def rotate(self, outputs: None, inputs: Tensor | None) -> "SharedBlock":
        """Rows in the basis ``1 ⊗ inputs``; None stands for the identity."""
        if inputs is None or self.a is None:
            return self
        return SharedBlock(self.columns, self.a @ inputs)

    def output_weights(self, v: Tensor) -> Tensor:
        """``Σᵢ a² v`` for each output of the layer, (b, n)."""
        matrix = v.reshape(self.n_outputs, -1)
        return matrix.T if self.a is None else self.a.squeeze(1) ** 2 @ matrix.T

    def matmul(self, v: Tensor) -> Tensor:
        """``rows @ v`` for ``v`` (p, q), as (b, n, q)."""
        matrices = v.unflatten(0, (self.n_outputs, -1))  # (n, i, q)
        if self.a is None:
            return self.columns.times(matrices.transpose(0, 1))
        products = [self.a.squeeze(1) @ m.T for m in matrices.unbind(2)]
        return self.columns.times(torch.stack(products, 2))

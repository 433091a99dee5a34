"""LinearisedNetwork: a network as if it were linear in all the selected weights.

Its most probable weights under a prior are those of the linearised model that
predictions are made with, not the network's own (Antorán et al. 2022, "Adapting the
linearised Laplace model evidence for modern deep learning", section 4). Only products
with the Jacobian are needed, whose rows stay unmultiplied.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sklaplace.core.budget import free_bytes
from sklaplace.curvature.ggn import GGN, Curvature, output_hessian
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures import Accumulator, Structure
from sklaplace.curvature.structures.base import Diagonalised
from sklaplace.curvature.structures.diag import DiagAccumulator
from sklaplace.curvature.structures.kron import KronAccumulator
from sklaplace.likelihoods import Likelihood
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.linear_model import LinearModel, Products
from sklaplace.posterior.tuning.task import LinearisedBatch

# Share of the free memory that rows of the Jacobian may take; where they would take
# more, every pass makes them anew.
SHARE = 4


@dataclass(frozen=True)
class LinearisedNetwork(LinearModel):
    """Training rows as the tangent of the network at its own weights sees them.

    Attributes
    ----------
    layout : Layout
        The selected weights.
    jacobians : iterable of Jacobian
        Rows of all outputs, batch by batch, always the same; passed for every product.
    outputs : Tensor of shape (N, c)
        Outputs of the network with its own weights.
    targets : Tensor
        As `Likelihood.targets` gives them.
    sample_weight : Tensor of shape (N,)
        Weights of the rows.
    weights : Tensor of shape (P,)
        The network's own weights.
    likelihood : Likelihood
        Of targets given outputs.
    curvature : Curvature
        How curvature is measured at other outputs.
    accumulator : callable
        Makes the accumulator of the structure in use, from a layout.
    keys : Tensor of shape (N,)
        What the rows draw by, see `draws`.
    structure : Structure
        Curvature at the network's own weights, for steps of about the right length.
    dtype : torch.dtype
        Of the network.
    """

    layout: Layout
    jacobians: Iterable[Jacobian]
    outputs: Tensor
    targets: Tensor
    sample_weight: Tensor
    weights: Tensor
    likelihood: Likelihood
    curvature: Curvature
    accumulator: Callable[[Layout], Accumulator]
    keys: Tensor
    structure: Structure
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        template: GaussianPosterior,
        rows: Iterable[LinearisedBatch],
        curvature: Curvature,
        accumulator: Callable[[Layout], Accumulator],
    ) -> "LinearisedNetwork":
        """The model of rows that can be passed again and again."""
        jacobians = _Jacobians(rows)
        pieces: list[tuple[Tensor, ...]] = []
        for some in jacobians.first_pass():
            assert some.keys is not None
            pieces.append((some.f, some.targets, some.weights, some.keys))
        f, targets, weights, keys = (torch.cat(p) for p in zip(*pieces, strict=True))
        return cls(
            layout=template.layout,
            jacobians=jacobians,
            outputs=f.double(),
            targets=targets.double() if targets.is_floating_point() else targets,
            sample_weight=weights.double(),
            weights=template.weights,
            likelihood=template.likelihood,
            curvature=curvature,
            accumulator=accumulator,
            keys=keys,
            structure=template.structure,
            dtype=f.dtype,
        )

    def products(self, dtype: torch.dtype) -> Products:
        """A pass over all rows for each."""

        def rows() -> Iterator[Jacobian]:
            for some in self.jacobians:
                yield some.double() if dtype == torch.float64 else some

        def forward(v: Tensor) -> Tensor:
            column = v.unsqueeze(-1)
            return torch.cat([some.matmul(column).squeeze(-1) for some in rows()])

        def backward(u: Tensor) -> Tensor:
            total, start = u.new_zeros(self.layout.n_parameters), 0
            for some in rows():
                piece = u[start : start + some.n_rows]
                total += some.rmatmul(piece.unsqueeze(-1)).squeeze(-1)
                start += some.n_rows
            return total

        return forward, backward

    def rows_at(
        self, f: Tensor, curvature: Curvature, accumulator: Accumulator
    ) -> Iterator[Jacobian]:
        """The Jacobian as it is, and the Hessian of the loss at outputs ``f``."""
        start = 0
        for some in self.jacobians:
            rows = slice(start, start + some.n_rows)
            start += some.n_rows
            given = f[rows], self.targets[rows], self.sample_weight[rows]
            keys = self.keys[rows]
            hessian = output_hessian(curvature, self.likelihood, *given, keys)
            columns = some.double().combined(hessian.factor())
            yield replace(columns, weights=given[2], keys=keys)

    def preconditioner_at(
        self, f: Tensor, rho: Tensor, dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor]:
        """By a structure that has an eigenbasis, or by Kronecker factors at ``f``."""
        one = torch.ones((), dtype=torch.float64, device=rho.device)
        structure = self.structure
        if not isinstance(structure, Diagonalised):
            has_masks = any(block.indices is not None for block in self.layout.blocks)
            kind = DiagAccumulator if has_masks else KronAccumulator
            structure = self.accumulated(kind(self.layout), f, GGN)
        precision = structure.precision(_bearable(rho, structure), one)

        def precondition(v: Tensor) -> Tensor:
            return precision.solve(v.double()).to(dtype)

        return precondition


def _bearable(rho: Tensor, structure: Structure) -> Tensor:
    """A prior as near to ``rho`` (P,) as the structure can bear."""
    if "diag" in structure.priors:
        return rho
    pieces = structure.layout.split(rho.log())
    means = torch.stack([piece.mean() for piece in pieces]).exp()
    return means if "layerwise" in structure.priors else rho.log().mean().exp()


class _Jacobians:
    """Jacobians of batches, kept where they fit and made anew where they do not."""

    def __init__(self, rows: Iterable[LinearisedBatch]) -> None:
        self._rows = rows
        self._kept: list[Jacobian] | None = []

    def first_pass(self) -> Iterator[LinearisedBatch]:
        """All there is to know of the rows, once."""
        size = 0
        for some in self._rows:
            size += _n_bytes(some.jacobian)
            if size > free_bytes(some.f.device) // SHARE:
                self._kept = None
            if self._kept is not None:
                self._kept.append(some.jacobian)
            yield some

    def __iter__(self) -> Iterator[Jacobian]:
        if self._kept is not None:
            yield from self._kept
            return
        for some in self._rows:
            yield some.jacobian


def _n_bytes(jacobian: Jacobian) -> int:
    gradients = {id(block.g): block.g.numel() for block in jacobian.blocks}
    inputs = [block.a.numel() for block in jacobian.blocks if block.a is not None]
    n_elements: int = sum(gradients.values()) + sum(inputs)
    return n_elements * torch.finfo(jacobian.dtype).bits // 8

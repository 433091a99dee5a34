"""LinearisedNetwork: a linear model in all selected weights of a network.

The linearised predictive is centred at the most probable weights of this model under
the prior, not at the network's own weights (Antorán et al. 2022, "Adapting the
linearised Laplace model evidence for modern deep learning", section 4). The model uses
only products with the factored Jacobian.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from sklaplace.core.budget import free_bytes
from sklaplace.curvature.ggn import GGN, Curvature
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures import Accumulator, Structure
from sklaplace.curvature.structures.base import Diagonalised
from sklaplace.curvature.structures.diag import DiagAccumulator
from sklaplace.curvature.structures.kron import KronAccumulator
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.linear_model import LabelledOutputs, LinearModel, Operator
from sklaplace.posterior.tuning.problem import LinearisedBatch

# Largest fraction of free memory for cached Jacobians. If the Jacobians need more
# memory, every pass recomputes them.
MAX_CACHED_FRACTION = 0.25


@dataclass(frozen=True)
class LinearisedNetwork(LinearModel):
    """Network linearised in all selected weights, on the training data.

    Attributes
    ----------
    jacobians : iterable of Jacobian
        Jacobian of all outputs, in batches. Each product iterates over the batches
        once.
    structure : Structure
        Curvature at the network's weights, used for preconditioning.
    """

    jacobians: Iterable[Jacobian]
    structure: Structure

    @classmethod
    def of(
        cls,
        template: GaussianPosterior,
        batches: Iterable[LinearisedBatch],
        curvature: Curvature,
        accumulator: Callable[[Layout], Accumulator],
    ) -> "LinearisedNetwork":
        """Build a model from batches that can be iterated over repeatedly.

        ``template`` is the posterior with the model's layout, weights and likelihood.
        """
        jacobians = _Jacobians(batches)
        # this pass also caches the Jacobians, if they fit in memory
        outputs = list(jacobians.first_pass())
        fields = {"jacobians": jacobians, "structure": template.structure}
        return cls.of_batches(template, outputs, curvature, accumulator, **fields)

    def products(self, dtype: torch.dtype) -> tuple[Operator, Operator]:
        """Return ``v -> J v``, (P,) to (N, c), and ``u -> Jᵀ u``, in ``dtype``.

        Each product takes one pass over all samples. Jacobians have the network's
        dtype, so only float64 requires a conversion.
        """

        def in_dtype() -> Iterator[Jacobian]:
            for jacobian in self.jacobians:
                yield jacobian.double() if dtype == torch.float64 else jacobian

        def forward(v: Tensor) -> Tensor:
            column = v.unsqueeze(-1)
            return torch.cat([j.matmul(column).squeeze(-1) for j in in_dtype()])

        def backward(u: Tensor) -> Tensor:
            total, start = u.new_zeros(self.layout.n_parameters), 0
            for jacobian in in_dtype():
                end = start + jacobian.n_samples
                total += jacobian.rmatmul(u[start:end].unsqueeze(-1)).squeeze(-1)
                start = end
            return total

        return forward, backward

    def jacobians_at(
        self, f: Tensor, curvature: Curvature, accumulator: Accumulator
    ) -> Iterator[Jacobian]:
        """Yield Jacobian rows ``Sᵀ J``; ``S Sᵀ`` is the output Hessian at ``f``.

        The batches of the Jacobian are those of its computation, whatever the
        accumulator can process at once.
        """
        start = 0
        for jacobian in self.jacobians:
            rows = slice(start, start + jacobian.n_samples)
            weights, keys = self.sample_weight[rows], self.keys[rows]
            hessian = curvature(
                self.likelihood, f[rows], self.targets[rows], weights, keys
            )
            combined = jacobian.double().combined(hessian.factor())
            yield replace(combined, weights=weights, keys=keys)
            start = rows.stop

    def preconditioner_at(self, f: Tensor, rho: Tensor, dtype: torch.dtype) -> Operator:
        """Return ``v -> M⁻¹ v`` for a structure ``M`` with an eigenbasis.

        ``M`` is the posterior's structure, computed once, if it has an eigenbasis.
        Otherwise, ``M`` is a Kronecker-factored or diagonal curvature at ``f``. ``ρ``
        is averaged over weights that must have equal precisions in ``M``.
        """
        # ρ is in units of the loss, whose factor is then one
        scale = torch.ones((), dtype=torch.float64, device=rho.device)
        structure = self.structure
        if not isinstance(structure, Diagonalised):
            has_masks = any(block.indices is not None for block in self.layout.blocks)
            # parts of a weight matrix have no Kronecker factors
            accumulator = DiagAccumulator if has_masks else KronAccumulator
            structure = self.accumulated(accumulator(self.layout), f, GGN)
        precision = structure.precision(_supported_prior(rho, structure), scale)
        return lambda v: precision.solve(v.double()).to(dtype)


def _supported_prior(rho: Tensor, structure: Structure) -> Tensor:
    """Average ``rho`` (P,) geometrically at the finest level ``structure`` supports.

    The levels are all weights (P,), parameter tensors (L,), and a single number ().
    """
    if "diag" in structure.priors:
        return rho
    if "layerwise" not in structure.priors:
        return rho.log().mean().exp()
    pieces = structure.layout.split(rho.log())
    return torch.stack([piece.mean() for piece in pieces]).exp()


class _Jacobians:
    """Jacobians of batches, cached if they fit in memory and recomputed otherwise."""

    def __init__(self, batches: Iterable[LinearisedBatch]) -> None:
        self._batches = batches
        self._cache: list[Jacobian] | None = []

    def first_pass(self) -> Iterator[LabelledOutputs]:
        """Yield the outputs of all batches, and cache the Jacobians.

        Once the Jacobians exceed the limit of memory, all of them are dropped, and
        later passes recompute them. The outputs are yielded in either case.
        """
        n_bytes = 0
        for batch in self._batches:
            n_bytes += _n_bytes(batch.jacobian)
            if n_bytes > MAX_CACHED_FRACTION * free_bytes(batch.f.device):
                self._cache = None
            if self._cache is not None:
                self._cache.append(batch.jacobian)
            keys = cast(Tensor, batch.keys)
            yield LabelledOutputs(batch.f, batch.targets, batch.weights, keys)

    def __iter__(self) -> Iterator[Jacobian]:
        return iter(self._cache or (batch.jacobian for batch in self._batches))


def _n_bytes(jacobian: Jacobian) -> int:
    """Return the memory that a Jacobian takes."""
    inputs = [block.a for block in jacobian.tensors() if block.a is not None]
    n_elements = sum(int(factor.numel()) for factor in [*jacobian.gradients(), *inputs])
    return n_elements * jacobian.dtype.itemsize

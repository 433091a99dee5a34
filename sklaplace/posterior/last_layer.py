"""LastLayerModel: the linear model of the last layer's weights.

Where the outputs are an affine map of the last layer's, ``f(θ) = f* + J (θ - θ*)`` is
exact, and ``J`` follows from the inputs of the layer, the features.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sklaplace.core.budget import BUDGET, batch_rows
from sklaplace.curvature.blocks import Block, HeadBlock
from sklaplace.curvature.ggn import GGN, Curvature, ggn_hessian, output_hessian
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.patches import second_moment
from sklaplace.curvature.structures import Accumulator, Structure
from sklaplace.curvature.structures.kron import Factor, Kron, KronAccumulator
from sklaplace.likelihoods.output_hessian import OutputHessian
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.linear_model import LinearModel, Operator

# Samples per input that the preconditioner's block of an output is made of, evenly
# spaced: more hardly save iterations and take longer.
SAMPLES_PER_INPUT = 8


@dataclass(frozen=True)
class LastLayerModel(LinearModel):
    """Linear model of the last layer, on the features of the training data.

    Attributes
    ----------
    features : Tensor of shape (N, i)
        Inputs of the last layer, float64.
    head_map : Tensor of shape (c, o)
        Gradient of the outputs in the layer's outputs, the same for all samples.
    """

    features: Tensor
    head_map: Tensor

    @property
    def _has_bias(self) -> bool:
        return len(self.layout.blocks) > 1

    @cached_property
    def _map(self) -> Tensor | None:
        """``head_map``; None for the identity."""
        m = self.head_map
        return None if torch.equal(m, torch.eye(*m.shape).to(m)) else m

    @cached_property
    def _in_own_dtype(self) -> "LastLayerModel":
        """The model in the dtype of the network."""
        names = "features", "head_map", "sample_weight"
        return replace(self, **{k: getattr(self, k).to(self.dtype) for k in names})

    def products(self, dtype: torch.dtype) -> tuple[Operator, Operator]:
        """``v -> J v`` and ``u -> Jᵀ u``: products with the features."""
        model = self if dtype == torch.float64 else self._in_own_dtype
        return model._forward, model._backward

    def _forward(self, direction: Tensor) -> Tensor:
        """``J direction``, (N, c)."""
        weight, *bias = self.layout.split(direction)
        # o x N is faster than N x o, since there are few outputs and many samples
        hidden = (weight.reshape(-1, self.features.shape[1]) @ self.features.T).T
        if bias:
            hidden = hidden + bias[0]
        return hidden if self._map is None else hidden @ self._map.T

    def _backward(self, cotangent: Tensor) -> Tensor:
        """``Jᵀ cotangent`` for (N, c), as (P,)."""
        hidden = cotangent if self._map is None else cotangent @ self._map
        weight = (hidden.T @ self.features).flatten()
        return torch.cat([weight, hidden.sum(0)]) if self._has_bias else weight

    def jacobians_at(
        self, f: Tensor, curvature: Curvature, accumulator: Accumulator
    ) -> Iterator[Jacobian]:
        """Jacobian rows as features and the Hessian of the loss at outputs ``f``."""
        tensors = self.features, f, self.targets, self.sample_weight, self.keys
        elements = accumulator.row_elements(self.layout, f.shape[1])
        n_rows = batch_rows(8 * (elements + self.features.shape[1]))
        batches = zip(*(tensor.split(n_rows) for tensor in tensors), strict=True)
        for features, *data in batches:
            hessian = output_hessian(curvature, self.likelihood, *data)
            blocks = [HeadBlock(hessian, self._map, features.unsqueeze(1))]
            if self._has_bias:
                blocks.append(HeadBlock(hessian, self._map))
            yield Jacobian(blocks, data[2], keys=data[3])

    @cached_property
    def _input_factor(self) -> Factor:
        """Kronecker factor of the features, which does not depend on the weights."""
        moment = second_moment(self.features.unsqueeze(1), self.sample_weight)
        return Factor(moment / self.sample_weight.sum())

    def _kron(self, f: Tensor, curvature: Curvature) -> Kron:
        """Kronecker-factored curvature at outputs ``f``."""
        data = self.targets, self.sample_weight, self.keys
        hessian = output_hessian(curvature, self.likelihood, f, *data)
        outputs, n = Factor(hessian.moment(self._map)), self.sample_weight.sum()
        inputs = [self._input_factor, Factor(f.new_ones(1, 1))]
        factors = tuple((outputs, a) for a in inputs[: len(self.layout.blocks)])
        return Kron(self.layout, factors, (n, torch.ones_like(n))[: len(factors)])

    def structure_at(self, f: Tensor) -> Structure:
        """Curvature at outputs ``f``; a Kronecker factor of the inputs is reused."""
        if isinstance(self.accumulator(self.layout), KronAccumulator):
            return self._kron(f, self.curvature)
        return super().structure_at(f)

    # ------------------------------------------------------------- preconditioners
    def preconditioner_at(self, f: Tensor, rho: Tensor, dtype: torch.dtype) -> Operator:
        """``v -> M⁻¹ v`` with ``M ≈ H + diag ρ``: a block per output, or Kronecker.

        Where classes are separated unequally well, outputs differ in curvature by
        orders of magnitude, and so may precisions; a Kronecker product describes
        neither, but takes less memory.
        """
        if (blocks := self._blockwise(f, rho, dtype)) is not None:
            return blocks
        kron = self._kron(f, GGN)
        eigenvalues = (kron.eigenvalues + rho.mean()).to(dtype)
        return lambda v: kron.from_basis(kron.to_basis(v) / eigenvalues)

    def _blockwise(self, f: Tensor, rho: Tensor, dtype: torch.dtype) -> Operator | None:
        """Inverse of the blocks of ``H + diag ρ`` of each output, on a subsample.

        None if the blocks are too large or, by rounding, singular. O(o·i³) time and
        o·i² numbers.
        """
        hessian = ggn_hessian(self.likelihood, f, self.targets)
        curvatures = hessian.weighted(self.sample_weight).diagonals(self._map)
        (n, i), o = self.features.shape, curvatures.shape[1]
        i += self._has_bias
        if 3 * 8 * o * i**2 > BUDGET:
            return None
        stride = max(1, n // (SAMPLES_PER_INPUT * i))
        some = self.features[::stride].to(dtype)
        if self._has_bias:
            some = torch.cat([some, torch.ones_like(some[:, :1])], 1)
        scales = curvatures[::stride].to(some) * (n / len(some))
        grams = [some.T @ (some * column) for column in scales.T.unsqueeze(2)]
        blocks = torch.stack(grams).double()
        blocks.diagonal(dim1=1, dim2=2).add_(self._by_output(rho))
        roots, failed = torch.linalg.cholesky_ex(blocks)
        if failed.any():
            return None
        inverses = torch.cholesky_inverse(roots).to(dtype)

        def apply(v: Tensor) -> Tensor:
            # a row times a symmetric matrix is faster than the matrix times a column
            solved = (self._by_output(v).unsqueeze(1) @ inverses).squeeze(1)
            parts = [solved[:, :-1].flatten(), solved[:, -1]]
            return torch.cat(parts) if self._has_bias else solved.flatten()

        return apply

    def _by_output(self, v: Tensor) -> Tensor:
        """Weights, and the bias, of each output in a row, (o, i), from (P,)."""
        weight, *bias = self.layout.split(v)
        weight = weight.reshape(self.layout.blocks[0].factor_shape)
        return torch.cat([weight, bias[0].unsqueeze(1)], 1) if bias else weight


class LastLayerRecorder:
    """Records the data of a `LastLayerModel` while the curvature is accumulated.

    Parameters
    ----------
    head_map : Tensor of shape (c, o) or None
        Gradient of the outputs in the last layer's outputs, if it was the same for a
        few samples. Recording stops at the first sample where it differs.
    """

    def __init__(self, head_map: Tensor | None) -> None:
        self._head_map = head_map
        self._batches: list[tuple[Tensor, ...]] = []

    @property
    def is_linear(self) -> bool:
        """Whether the outputs are affine in the weights on all recorded samples."""
        return self._head_map is not None and bool(self._batches)

    def add(
        self,
        f: Tensor,
        columns: OutputHessian,
        jacobian: Jacobian,
        targets: Tensor,
        weights: Tensor | None,
        keys: Tensor | None,
    ) -> None:
        """Record a batch; ``jacobian`` has the rows ``SᵀJ``, ``columns`` its ``S``."""
        if self._head_map is None:
            return
        block = jacobian.blocks[0]
        assert block.a is not None
        if isinstance(block, Block) and not self._agrees(block, columns, jacobian):
            self._head_map, self._batches = None, []
        elif not jacobian.first_column:
            w = torch.ones(len(f), device=f.device) if weights is None else weights
            k = torch.zeros(len(f), dtype=torch.long) if keys is None else keys
            self._batches.append((block.a.squeeze(1), f, targets, w, k))

    def _agrees(self, block: Block, hessian: OutputHessian, jacobian: Jacobian) -> bool:
        """Whether output gradients are those of the map, on one combination.

        One combination of outputs costs a c-th of all; a `HeadBlock` needs no check.
        """
        m = self._head_map
        assert m is not None
        probe = torch.linspace(1, 2, len(m[0])).to(m)
        columns = hessian.factor().double()[..., jacobian.first_column :]
        expected = columns[..., : jacobian.n_columns].mT @ (m @ probe)
        difference = block.g.squeeze(2).double() @ probe - expected
        return bool(difference.abs().max() <= 1e-4 * expected.abs().max())

    def build(
        self,
        template: GaussianPosterior,
        curvature: Curvature,
        accumulator: Callable[[Layout], Accumulator],
    ) -> LastLayerModel | None:
        """Linear model of the last layer; None if the outputs are not affine in it."""
        if not self.is_linear:
            return None
        features = torch.cat([batch[0] for batch in self._batches]).double()
        parts = {"features": features, "head_map": self._head_map}
        data = [data for _, *data in self._batches]
        return LastLayerModel._of(template, data, curvature, accumulator, **parts)

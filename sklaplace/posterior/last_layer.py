"""LinearHead: the last layer as the linear model that it is.

Where the selected weights enter linearly, ``f(θ) = f* + J (θ - θ*)`` holds
exactly, and training rows are features.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from sklaplace.core.budget import batch_rows
from sklaplace.curvature.blocks import Block, HeadBlock
from sklaplace.curvature.ggn import GGN, Curvature, ggn_hessian, output_hessian
from sklaplace.curvature.jacobian import Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.patches import second_moment
from sklaplace.curvature.structures import Accumulator, Structure
from sklaplace.curvature.structures.kron import Factor, Kron, KronAccumulator
from sklaplace.likelihoods import Likelihood
from sklaplace.likelihoods.output_hessian import OutputHessian
from sklaplace.posterior.gaussian import GaussianPosterior
from sklaplace.posterior.linear_model import LinearModel, Products
from sklaplace.posterior.preconditioners import kronecker, output_blocks


@dataclass(frozen=True)
class LinearHead(LinearModel):
    """Training rows as the last layer sees them. All float64.

    Losses and gradients are, too; only the products within a Newton step, which the
    next gradient corrects, are made in the dtype of the network.

    Attributes
    ----------
    layout : Layout
        Weight and, where there is one, bias of the head.
    features : Tensor of shape (N, i)
        Inputs of the head.
    outputs : Tensor of shape (N, c)
        Outputs of the network with its own weights.
    output_map : Tensor of shape (c, o)
        Gradient of the outputs in what the head puts out, the same for all rows.
    targets : Tensor
        As `Likelihood.targets` gives them.
    sample_weight : Tensor of shape (N,)
        Weights of the rows.
    weights : Tensor of shape (P,)
        The network's own weights.
    likelihood : Likelihood
        Of targets given outputs.
    curvature : callable
        Entry of ``CURVATURES``.
    accumulator : callable
        Makes the accumulator of the structure in use, from a layout.
    keys : Tensor of shape (N,)
        What the rows draw by, see `draws`.
    dtype : torch.dtype
        Of the network.
    """

    layout: Layout
    features: Tensor
    outputs: Tensor
    output_map: Tensor
    targets: Tensor
    sample_weight: Tensor
    weights: Tensor
    likelihood: Likelihood
    curvature: Curvature
    accumulator: Callable[[Layout], Accumulator]
    keys: Tensor
    dtype: torch.dtype

    def products(self, dtype: torch.dtype) -> Products:
        """Products with the features, in a dtype."""
        rows = self if dtype == torch.float64 else self._rows_in(dtype)
        return rows._forward, rows._backward

    def _forward(self, direction: Tensor) -> Tensor:
        """``J direction``, (N, c)."""
        weight, *bias = self.layout.split(direction)
        # few outputs times many rows is quicker than rows times outputs
        hidden = (weight.reshape(-1, self.features.shape[1]) @ self.features.T).T
        if bias:
            hidden = hidden + bias[0]
        return hidden if self._map is None else hidden @ self._map.T

    def _backward(self, cotangent: Tensor) -> Tensor:
        """``Jᵀ cotangent`` for (N, c), as (P,)."""
        hidden = cotangent if self._map is None else cotangent @ self._map
        weight = (hidden.T @ self.features).flatten()
        has_bias = len(self.layout.blocks) > 1
        return torch.cat([weight, hidden.sum(0)]) if has_bias else weight

    def rows_at(
        self, f: Tensor, curvature: Curvature, accumulator: Accumulator
    ) -> Iterator[Jacobian]:
        """Features, and the Hessian of the loss at outputs ``f``."""
        hessian = partial(output_hessian, curvature, self.likelihood)
        given = self.features, f, self.targets, self.sample_weight, self.keys
        elements = accumulator.row_elements(self.layout, f.shape[1])
        n_rows = batch_rows(8 * (elements + self.features.shape[1]))
        pieces = [tensor.split(n_rows) for tensor in given]
        for features, outputs, targets, weights, keys in zip(*pieces, strict=True):
            columns = hessian(outputs, targets, weights, keys)
            blocks = [
                HeadBlock(columns, self._map, features.unsqueeze(1)),
                HeadBlock(columns, self._map),
            ]
            some = blocks[: len(self.layout.blocks)]
            yield Jacobian(some, weights, keys=keys)

    @cached_property
    def _map(self) -> Tensor | None:
        """``output_map``; None for the identity."""
        m = self.output_map
        identity = torch.eye(*m.shape, dtype=m.dtype, device=m.device)
        return None if torch.equal(m, identity) else m

    @cached_property
    def _converted(self) -> dict[torch.dtype, "LinearHead"]:
        return {}

    def _rows_in(self, dtype: torch.dtype) -> "LinearHead":
        """The same rows in a dtype, converted once."""
        if dtype not in self._converted:
            names = "features", "output_map", "sample_weight"
            tensors = {name: getattr(self, name).to(dtype) for name in names}
            self._converted[dtype] = replace(self, **tensors)
        return self._converted[dtype]

    @cached_property
    def _input_factor(self) -> Factor:
        """The Kronecker factor that no change of the weights changes."""
        moment = second_moment(self.features.unsqueeze(1), self.sample_weight)
        return Factor(moment / self.sample_weight.sum())

    def _kron(self, f: Tensor, curvature: Curvature) -> Kron:
        """Kronecker structure at outputs ``f``."""
        given = self.targets, self.sample_weight, self.keys
        hessian = output_hessian(curvature, self.likelihood, f, *given)
        outputs = Factor(hessian.moment(self._map))
        one = torch.ones(1, 1, dtype=f.dtype, device=f.device)
        inputs = [self._input_factor, Factor(one)][: len(self.layout.blocks)]
        n = self.sample_weight.sum()
        counts = tuple([n, torch.ones_like(n)][: len(inputs)])
        return Kron(self.layout, tuple((outputs, a) for a in inputs), counts)

    def structure_at(self, f: Tensor) -> Structure:
        """The structure in use at outputs ``f``; of ``kron`` one factor stays."""
        if isinstance(self.accumulator(self.layout), KronAccumulator):
            return self._kron(f, self.curvature)
        return super().structure_at(f)

    def preconditioner_at(
        self, f: Tensor, rho: Tensor, dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor]:
        """``v -> (H + diag ρ)⁻¹ v``, roughly."""
        hessian = ggn_hessian(self.likelihood, f, self.targets)
        hessian = hessian.weighted(self.sample_weight)
        features = self._rows_in(dtype).features
        curvatures = hessian.diagonals(self._map)
        blocks = output_blocks(self.layout, features, curvatures, rho)
        return blocks or kronecker(self._kron(f, GGN), rho, dtype)


class HeadRows:
    """Collects the rows of a `LinearHead` while the curvature is accumulated.

    Parameters
    ----------
    output_map : Tensor of shape (c, o) or None
        Gradient of the outputs in what the last layer puts out, if it looked
        like one for all rows. Collecting stops at the first row where it is not.
    """

    def __init__(self, output_map: Tensor | None) -> None:
        self._output_map = output_map
        self._rows: list[tuple[Tensor, ...]] = []

    @property
    def is_linear(self) -> bool:
        """Whether there are rows to build a head of."""
        return self._output_map is not None and bool(self._rows)

    def add(
        self,
        f: Tensor,
        columns: OutputHessian,
        jacobian: Jacobian,
        targets: Tensor,
        weights: Tensor | None,
        keys: Tensor | None,
    ) -> None:
        """Take one batch; ``jacobian`` has the rows of ``SᵀJ``, ``columns`` its S."""
        if self._output_map is None:
            return
        block = jacobian.blocks[0]
        assert block.a is not None
        if isinstance(block, Block) and not self._is_expected(block, columns, jacobian):
            self._output_map, self._rows = None, []
            return
        if jacobian.first_column:
            return
        w = torch.ones(len(f), device=f.device) if weights is None else weights
        k = torch.zeros(len(f), dtype=torch.long) if keys is None else keys
        self._rows.append((block.a.squeeze(1), f, targets, w, k))

    def _is_expected(
        self, block: Block, hessian: OutputHessian, jacobian: Jacobian
    ) -> bool:
        """Whether output gradients are those of the map; `HeadBlock` has seen to it.

        One combination of outputs tells two maps apart at a c-th of the cost.
        """
        m = self._output_map
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
    ) -> LinearHead | None:
        """The head as a linear model; None where it is not linear."""
        if not self.is_linear:
            return None
        assert self._output_map is not None
        features, outputs, targets, weights, keys = (
            torch.cat(parts) for parts in zip(*self._rows, strict=True)
        )
        targets = targets.double() if targets.is_floating_point() else targets
        return LinearHead(
            layout=template.layout,
            features=features.double(),
            outputs=outputs.double(),
            output_map=self._output_map,
            targets=targets,
            sample_weight=weights.double(),
            weights=template.weights,
            likelihood=template.likelihood,
            curvature=curvature,
            accumulator=accumulator,
            keys=keys,
            dtype=self._rows[0][0].dtype,
        )

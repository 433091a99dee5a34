"""Predictives: from the posterior over weights to a Gaussian over outputs.

The linearised predictive (``glm``) is exact for the linearised network:
``f(x) ~ N(f* + J (mean - weights), J Σ Jᵀ)`` (Immer, Korzepa and Bauer 2021,
"Improving predictions of Bayesian neural nets via local linearization"). Weights that
are drawn for the network itself (``nn``) give whatever distribution it makes of them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.utils.data import default_collate

from sklaplace.core.budget import CACHE
from sklaplace.core.trees import leaves, tree_rows
from sklaplace.curvature.jacobian import (
    Centring,
    Jacobian,
    add_axis,
    backpropagate,
    backpropagate_in_parts,
    call_with,
    joined,
    quiet_batching,
)
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures import Projection, projected
from sklaplace.networks.forward import Forward
from sklaplace.posterior.gaussian import GaussianPosterior

# Numbers that a network is taken to make of each number of its input, at a time.
PASSES = 16


def linearised_mean(
    posterior: GaussianPosterior, f: Tensor, jacobian: Jacobian
) -> Tensor:
    """Mean of the linearised outputs, (b, c), float64.

    ``f`` and ``jacobian`` are those of the network's own weights.
    """
    if not posterior.is_refitted:
        return f.double()
    shift = (posterior.mean - posterior.weights).unsqueeze(-1)
    return f.double() + jacobian.matmul(shift.to(jacobian.dtype)).squeeze(-1)


@dataclass
class Linearised:
    """One batch of rows, linearised at the network's weights: ready for questions.

    Attributes
    ----------
    f : Tensor of shape (b, k)
        Outputs that the Jacobian has rows for.
    jacobian : Jacobian
        k rows for each row of the batch.
    """

    f: Tensor
    jacobian: Jacobian
    _projection: Projection | None = None

    def gaussian(
        self, posterior: GaussianPosterior, *, diagonal: bool
    ) -> tuple[Tensor, Tensor]:
        """Mean (b, k) and covariance (b, k, k), or variances (b, k)."""
        mean = linearised_mean(posterior, self.f, self.jacobian)
        if diagonal:
            return mean, posterior.functional_variance(self.jacobian)
        if posterior.likelihood.n_blocks > 1:
            return self.projected(posterior, diagonal=False)
        return mean, posterior.functional_covariance(self.jacobian)

    def projected(
        self, posterior: GaussianPosterior, *, diagonal: bool
    ) -> tuple[Tensor, Tensor]:
        """The same for many prior precisions: rows are rotated into a basis once."""
        if self._projection is None or (
            self._projection.structure is not posterior.structure
        ):
            n_blocks = 1 if diagonal else posterior.likelihood.n_blocks
            self._projection = projected(posterior.structure, self.jacobian, n_blocks)
        mean = linearised_mean(posterior, self.f, self.jacobian)
        projection, precision = self._projection, posterior.precision
        return mean, projection.covariance(precision, diagonal=diagonal)


def linearise(
    forward: Forward,
    x: Any,
    layout: Layout,
    *,
    diagonal: bool,
    cotangents: Centring | None = None,
) -> Iterator[Linearised]:
    """Rows of a batch, some outputs at a time if ``diagonal`` and they are many.

    ``cotangents`` takes means over outputs off each output.
    """
    parts = backpropagate_in_parts(forward, x, layout, cotangents)
    if not diagonal:
        parts = iter([joined(list(parts))])
    for f, jacobian in parts:
        outputs = f if cotangents is None else cotangents.centred(f)
        first = jacobian.first_column
        yield Linearised(outputs[:, first : first + jacobian.n_columns], jacobian)


def glm(
    posterior: GaussianPosterior,
    forward: Forward,
    x: Any,
    *,
    diagonal: bool = False,
    centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """Mean (b, c) and covariance (b, c, c) of the linearised outputs, float64.

    Of a likelihood with r > 1 blocks of K outputs the covariances are (b, r, K, K).

    Parameters
    ----------
    posterior : GaussianPosterior
        Over the weights of the network.
    forward : Forward
        The network, inside ``forward.frozen()``.
    x : Tensor, or dict, list or tuple of tensors
        One batch of b rows.
    diagonal : bool, default=False
        Return variances (b, c) in place of covariances, which then never exist.
    centred : bool, default=False
        Take the mean over outputs off each output, which a softmax does not see.
        It can be uncertain by orders of magnitude more than the rest.

    Notes
    -----
    Costs one forward pass and, unless only the last layer is random, c backward
    columns down to the selected weights.
    """
    layout = posterior.layout
    cotangents = Centring(posterior.likelihood.n_blocks) if centred else None
    parts = linearise(forward, x, layout, diagonal=diagonal, cotangents=cotangents)
    return side_by_side(part.gaussian(posterior, diagonal=diagonal) for part in parts)


def side_by_side(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Means and variances of some outputs each, as those of all."""
    means, spreads = zip(*parts, strict=True)
    if len(means) == 1:
        return means[0], spreads[0]
    return torch.cat(means, 1), torch.cat(spreads, 1)


def linearised_draws(
    posterior: GaussianPosterior, forward: Forward, x: Any, weights: Tensor
) -> Tensor:
    """Outputs (b, c, s) of the linearised network under weights (s, P), float64."""
    f, jacobian = backpropagate(forward, x, posterior.layout)
    shifts = (weights - posterior.weights).T
    return f.double().unsqueeze(-1) + jacobian.double().matmul(shifts)


class WeightDistribution(Protocol):
    """Anything that weights of a network can be drawn from."""

    @property
    def layout(self) -> Layout:
        """The weights that are drawn."""

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Weights (s, P), float64."""


def network_draws(
    posterior: WeightDistribution, forward: Forward, x: Any, weights: Tensor
) -> Tensor:
    """Outputs (b, c, s) of the network itself under weights (s, P), float64.

    One forward pass for each draw, or for as many draws at a time as the caches hold;
    the network's own weights are not touched.
    """
    own = dict(forward.module.named_parameters())

    def outputs(vector: Tensor) -> Tensor:
        values = posterior.layout.unflatten(vector, forward.module)
        given = {name: value.to(own[name]) for name, value in values.items()}
        return call_with(forward, given, x).double()

    size = weights.shape[1] + PASSES * sum(leaf.numel() for leaf in leaves(x))
    at_once = CACHE // 8 // size
    with torch.no_grad():
        if at_once > 1 and forward.takes_many:
            found = _vectorised(outputs, forward, weights.split(at_once))
            if found is not None:
                return found.movedim(0, -1)
        return torch.stack([outputs(vector) for vector in weights], -1)


def _vectorised(
    outputs: Callable[[Tensor], Tensor], forward: Forward, parts: Iterable[Tensor]
) -> Tensor | None:
    """Outputs (s, b, c) of many draws in one pass; None where an operator refuses."""
    # what a module notes while it runs is of no use outside of vmap
    noted = [(part, dict(vars(part))) for part in forward.module.modules()]
    try:
        with quiet_batching():
            return torch.cat([vmap(outputs)(part) for part in parts])
    except RuntimeError:  # no batching rule: one draw after the other
        forward.takes_many = False
        return None
    finally:
        for module, attributes in noted:
            vars(module).clear()
            vars(module).update(attributes)


def moments(
    draws: Tensor, *, diagonal: bool, centred: bool, n_blocks: int = 1
) -> tuple[Tensor, Tensor]:
    """Mean (b, c), and variances (b, c) or covariances (b, c, c), of (b, c, s).

    Of several blocks of outputs the covariances are (b, r, K, K).
    """
    groups = draws.unflatten(1, (n_blocks, -1))
    if centred:
        groups = groups - groups.mean(2, keepdim=True)
        draws = groups.flatten(1, 2)
    mean = draws.mean(-1)
    deviations = draws - mean.unsqueeze(-1)
    n = max(1, draws.shape[-1] - 1)
    if diagonal:
        return mean, (deviations**2).sum(-1) / n
    if n_blocks > 1:
        deviations = deviations.unflatten(1, (n_blocks, -1))
    return mean, deviations @ deviations.mT / n


def in_graph(
    posterior: GaussianPosterior, forward: Forward, x: Any
) -> tuple[Tensor, Tensor]:
    """Mean (b, c) and covariance (b, c, c) of the linearised outputs, float64.

    Differentiable in ``x``, unlike `glm`, whose Jacobians are outside of the graph.

    Notes
    -----
    Rows of the Jacobian are written out: b·c·P numbers, and c backward passes through
    each row.
    """
    own = {name: p.detach() for name, p in forward.module.named_parameters()}
    chosen = {block.name: own[block.name] for block in posterior.layout.blocks}

    def outputs(values: dict[str, Tensor], row: Any) -> Tensor:
        return call_with(forward, values, add_axis(row))[0]

    def both(row: Any) -> tuple[dict[str, Tensor], Tensor]:
        return jacrev(outputs)(chosen, row), outputs(chosen, row)

    try:
        with quiet_batching():
            rows, f = vmap(both)(x)
    except RuntimeError:  # an operator without a batching rule: row by row
        n_rows = len(next(leaves(x)))
        rows, f = default_collate([both(tree_rows(x, n)) for n in range(n_rows)])
    layout = posterior.layout
    jacobian = layout.flatten(rows[block.name] for block in layout.blocks).double()
    mean = f.double() + jacobian @ (posterior.mean - posterior.weights)
    return mean, posterior.precision.covariance_of_rows(jacobian)


@dataclass(frozen=True)
class Predictive:
    """How weights become outputs.

    Attributes
    ----------
    draws : callable
        ``(posterior, forward, x, weights (s, P)) -> outputs (b, c, s)``, float64.
    gaussian : callable or None
        As `glm`, where the outputs are Gaussian; None: the draws say what they are.
    """

    draws: Callable[[GaussianPosterior, Forward, Any, Tensor], Tensor]
    gaussian: Callable[..., tuple[Tensor, Tensor]] | None = None


PREDICTIVES: dict[str, Predictive] = {
    "glm": Predictive(linearised_draws, glm),
    "nn": Predictive(network_draws),
}

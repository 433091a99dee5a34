"""Curvature: which square root of the Hessian of the loss is propagated.

``H = Σₙ Jₙᵀ Sₙ Sₙᵀ Jₙ``: a curvature is a choice of ``S`` (b, c, k), a function
of likelihood, outputs and targets alone. The exact Hessian has a second part, in which
the network itself bends, and is added up as a matrix.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.checks import Check, check_count
from sklaplace.core.linalg import all_finite
from sklaplace.core.random import counter_uniforms, row_hash
from sklaplace.curvature.jacobian import backpropagate_in_parts, exact_hessian
from sklaplace.curvature.structures import Accumulator
from sklaplace.likelihoods import DataFit, Likelihood, output_weights, weighted
from sklaplace.likelihoods.output_hessian import Factored, OutputHessian
from sklaplace.networks.forward import Forward

# targets that each row is imagined to have
N_DRAWS = 10


def ggn(likelihood: Likelihood, f: Tensor, y: Tensor, keys: Tensor) -> Tensor:
    """Generalised Gauss-Newton: the exact Hessian of the loss in the outputs.

    Equal to the Fisher information for all likelihoods here (Martens 2020,
    "New insights and perspectives on the natural gradient method").
    """
    return _weigh_labels(likelihood.hessian_factor(f), likelihood, y)


def ef(likelihood: Likelihood, f: Tensor, y: Tensor, keys: Tensor) -> Tensor:
    """Empirical Fisher: the gradient of the loss at the targets themselves, k = 1.

    Cheap, and no Hessian: it vanishes where targets are fitted (Kunstner, Balles and
    Hennig 2019, "Limitations of the empirical Fisher approximation"). Of second order
    in the scale of the loss: ``Σ (f - y)² JᵀJ / σ⁴`` for one output with noise.
    """
    return likelihood.gradient(f, y).unsqueeze(-1)


def ggn_mc(
    likelihood: Likelihood,
    f: Tensor,
    y: Tensor,
    keys: Tensor,
    n_draws: int = N_DRAWS,
    seed: int = 0,
) -> Tensor:
    """Fisher information by gradients at ``n_draws`` targets that the network draws.

    Unbiased for the generalised Gauss-Newton matrix, with k = ``n_draws`` in place of
    c columns; for hundreds of classes. What a row draws depends on the seed and on its
    inputs, not on the rows that come with it.
    """
    noise = counter_uniforms(keys, n_draws * likelihood.n_draws(f.shape[-1]), seed)
    drawn = [likelihood.draw(f, u) for u in noise.to(f.device).chunk(n_draws, -1)]
    columns = [likelihood.score(f, target) for target in drawn]
    root = torch.stack(columns, -1) * float(n_draws**-0.5)
    return _weigh_labels(root, likelihood, y)


def _weigh_labels(root: Tensor, likelihood: Likelihood, y: Tensor) -> Tensor:
    """``S`` of outputs whose losses have weights of their own."""
    weights = output_weights(likelihood, y, root.shape[1])
    return root if weights is None else root * weights.sqrt().to(root).unsqueeze(-1)


def ggn_hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> OutputHessian:
    """``S Sᵀ`` of `ggn`, not written out."""
    weights = output_weights(likelihood, y, f.shape[1])
    return likelihood.hessian(f).scaled(weights)


@dataclass(frozen=True)
class Curvature:
    """An approximation of the Hessian, with the options that it was given.

    Attributes
    ----------
    root : callable
        ``(likelihood, f, y, keys, **options) -> S`` (b, c, k).
    closed_form : callable or None
        ``(likelihood, f, y) -> OutputHessian`` where ``S Sᵀ`` need not be written out.
    order : int
        Power of ``likelihood.scale`` that the posterior multiplies it by.
    is_exact : bool
        Whether the network's own second derivatives are added.
    is_random : bool
        Whether there is an option ``seed``.
    checks : mapping
        Options that a user has, each with a check of its value.
    options : mapping
        Those in use.
    """

    root: Callable[..., Tensor]
    closed_form: Callable[[Likelihood, Tensor, Tensor], OutputHessian] | None = None
    order: int = 1
    is_exact: bool = False
    is_random: bool = False
    checks: Mapping[str, Check] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def configured(self, options: Mapping[str, Any], seed: int) -> "Curvature":
        """The same with options and, where it draws, a seed."""
        known = {"seed": seed, **options} if self.is_random else dict(options)
        return replace(self, options=known)

    def __call__(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, keys: Tensor | None = None
    ) -> Tensor:
        """``S`` (b, c, k); rows without keys draw by their outputs."""
        keys = row_hash(f) if keys is None else keys
        return self.root(likelihood, f, y, keys, **self.options)


CURVATURES: dict[str, Curvature] = {
    "ef": Curvature(ef, order=2),
    "ggn": Curvature(ggn, ggn_hessian),
    "ggn_mc": Curvature(ggn_mc, is_random=True, checks={"n_draws": check_count}),
    # of a head, in which outputs are linear, the two are the same
    "hessian": Curvature(ggn, ggn_hessian, is_exact=True),
}
GGN = CURVATURES["ggn"]


def output_hessian(
    curvature: Curvature,
    likelihood: Likelihood,
    f: Tensor,
    y: Tensor,
    weights: Tensor | None,
    keys: Tensor | None = None,
) -> OutputHessian:
    """``w S Sᵀ`` for each row, written out only where there is no closed form."""
    if curvature.closed_form is not None:
        return curvature.closed_form(likelihood, f, y).weighted(weights)
    return Factored(curvature(likelihood, f, y, keys)).weighted(weights)


def accumulate(
    forward: Forward,
    batches: Iterable[tuple[Any, Any, Tensor | None]],
    likelihood: Likelihood,
    curvature: Curvature,
    accumulator: Accumulator,
    observe: Callable[..., None] | None = None,
) -> DataFit:
    """Add up the curvature and the loss over batches ``(x, y, weights)``.

    Parameters
    ----------
    forward : Forward
        The network, inside ``forward.frozen()``.
    batches : iterable
        Weights are (b,) or None. Passed more than once if the accumulator asks for it.
    likelihood, curvature, accumulator
        What to add up; the accumulator is updated in place.
    observe : callable, optional
        Called with ``(f, hessian, jacobian, targets, weights, keys)`` of every batch,
        or of every part of its columns.

    Returns
    -------
    DataFit
        Weighted loss and number of targets.

    Raises
    ------
    ValueError
        If an output is not finite.
    """
    losses, counts = [], []
    for x, y, weights in batches:
        batch = _Batch(likelihood, curvature, x, y, weights)
        if curvature.is_exact and accumulator.layout.head is None:
            f = batch.add_exactly(forward, accumulator)
        else:
            f = batch.add(forward, accumulator, observe)
        losses.append(batch.loss(f))
        counts.append(batch.n_targets(f))
    while accumulator.needs_another_pass():
        for x, y, weights in batches:
            _Batch(likelihood, curvature, x, y, weights).add(forward, accumulator, None)
    return DataFit(torch.stack(losses).sum(), torch.stack(counts).sum())


@dataclass
class _Batch:
    """Targets of one batch; how they are read is known once there are outputs."""

    likelihood: Likelihood
    curvature: Curvature
    x: Any
    y: Any
    given: Tensor | None
    weights: Tensor | None = None
    keys: Tensor | None = None

    def add(
        self,
        forward: Forward,
        accumulator: Accumulator,
        observe: Callable[..., None] | None,
    ) -> Tensor:
        """Add the rows ``Sᵀ J``; returns the outputs (b, c)."""
        if self.curvature.closed_form is None or accumulator.takes_keys:
            self.keys = row_hash(self.x)
        parts = backpropagate_in_parts(
            forward, self.x, accumulator.layout, self.columns
        )
        for f, jacobian in parts:
            _check_outputs(f)
            rows = replace(jacobian, weights=self.weights, keys=self.keys)
            accumulator.update(rows)
            if observe is not None:
                seen = f, self.hessian, jacobian, self.targets, self.weights
                observe(*seen, self.keys)
        return f

    def add_exactly(self, forward: Forward, accumulator: Accumulator) -> Tensor:
        """Add the Hessian of the loss in the weights; returns the outputs (b, c)."""
        with torch.no_grad():
            f: Tensor = forward(self.x)
        _check_outputs(f)
        self._read(f)

        def total(outputs: Tensor) -> Tensor:
            losses = self.likelihood.loss(outputs, self.targets)
            loss: Tensor = self.row_weights(f).to(losses) @ losses
            return loss

        hessian = exact_hessian(forward, self.x, accumulator.layout, total)
        accumulator.add_matrix(hessian)
        return f

    def _read(self, f: Tensor) -> None:
        """Targets, and the weights that the criterion gives to their kind."""
        self.targets = self.likelihood.targets(self.y, f)
        self.weights = weighted(self.likelihood, self.targets, self.given)

    def columns(self, f: Tensor) -> OutputHessian:
        """``w S Sᵀ`` of each row."""
        self._read(f)
        self.hessian = output_hessian(
            self.curvature, self.likelihood, f, self.targets, self.weights, self.keys
        )
        return self.hessian

    def row_weights(self, f: Tensor) -> Tensor:
        """Weights (b,), float64."""
        if self.weights is None:
            return torch.ones(len(f), dtype=torch.float64, device=f.device)
        return self.weights.double()

    def n_targets(self, f: Tensor) -> Tensor:
        """Sum of the weights of observed values, (), float64."""
        weights = self.likelihood.label_weights(self.targets)
        if weights is None:
            return self.row_weights(f).sum() * self.likelihood.n_targets(f.shape[1])
        total: Tensor = self.row_weights(f) @ weights.sum(1)
        return total

    def loss(self, f: Tensor) -> Tensor:
        """Weighted sum of the loss, (), float64."""
        targets = self.targets
        wide = targets.double() if targets.is_floating_point() else targets
        total: Tensor = self.row_weights(f) @ self.likelihood.loss(f.double(), wide)
        return total


def _check_outputs(f: Tensor) -> None:
    if not all_finite(f):
        raise ValueError(
            "The network's outputs are not finite on some training rows: its "
            "training has diverged. Lower the learning rate or scale the inputs."
        )

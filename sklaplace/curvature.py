"""Curvature: which square root of the Hessian of the loss is propagated.

``H = Σₙ Jₙᵀ Sₙ Sₙᵀ Jₙ``: a curvature is a choice of ``S`` (b, c, k), a function
of likelihood, outputs and targets alone.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sklaplace.forward import Forward
from sklaplace.hessians import Factored, OutputHessian
from sklaplace.jacobians import backpropagate_in_parts
from sklaplace.likelihoods import DataFit, Likelihood
from sklaplace.linalg import all_finite
from sklaplace.structures import Accumulator

Curvature = Callable[[Likelihood, Tensor, Tensor], Tensor]


def ggn(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Generalised Gauss-Newton: the exact Hessian of the loss in the outputs.

    Equal to the Fisher information for all likelihoods here (Martens 2020,
    "New insights and perspectives on the natural gradient method").
    """
    return likelihood.hessian_factor(f)


CURVATURES: dict[str, Curvature] = {"ggn": ggn}


def _ggn_hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> OutputHessian:
    return likelihood.hessian(f)


# curvatures whose ``S Sᵀ`` is known in closed form
CLOSED_FORMS: dict[Curvature, Callable[[Likelihood, Tensor, Tensor], OutputHessian]] = {
    ggn: _ggn_hessian
}


def output_hessian(
    curvature: Curvature,
    likelihood: Likelihood,
    f: Tensor,
    y: Tensor,
    weights: Tensor | None,
) -> OutputHessian:
    """``w S Sᵀ`` for each row, written out only where there is no closed form."""
    closed = CLOSED_FORMS.get(curvature)
    if closed is not None:
        return closed(likelihood, f, y).weighted(weights)
    return Factored(curvature(likelihood, f, y)).weighted(weights)


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
        Weights are (b,) or None.
    likelihood, curvature, accumulator
        What to add up; the accumulator is updated in place.
    observe : callable, optional
        Called with ``(f, hessian, jacobian, targets, weights)`` of every batch, or
        of every part of its columns.

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
        batch = _Batch(likelihood, curvature, y, weights)
        parts = backpropagate_in_parts(forward, x, accumulator.layout, batch.columns)
        for f, jacobian in parts:
            if not all_finite(f):
                raise ValueError(
                    "The network's outputs are not finite on some training rows: its "
                    "training has diverged. Lower the learning rate or scale the "
                    "inputs."
                )
            accumulator.update(replace(jacobian, weights=weights))
            if observe is not None:
                observe(f, batch.hessian, jacobian, batch.targets, weights)
        losses.append(batch.loss(f))
        counts.append(batch.row_weights(f).sum() * likelihood.n_targets(f.shape[1]))
    return DataFit(torch.stack(losses).sum(), torch.stack(counts).sum())


@dataclass
class _Batch:
    """Targets of one batch; how they are read is known once there are outputs."""

    likelihood: Likelihood
    curvature: Curvature
    y: Any
    weights: Tensor | None

    def columns(self, f: Tensor) -> OutputHessian:
        """``w S Sᵀ`` of each row."""
        self.targets = self.likelihood.targets(self.y, f)
        self.hessian = output_hessian(
            self.curvature, self.likelihood, f, self.targets, self.weights
        )
        return self.hessian

    def row_weights(self, f: Tensor) -> Tensor:
        """Weights (b,), float64."""
        if self.weights is None:
            return torch.ones(len(f), dtype=torch.float64, device=f.device)
        return self.weights.double()

    def loss(self, f: Tensor) -> Tensor:
        """Weighted sum of the loss, (), float64."""
        targets = self.targets
        wide = targets.double() if targets.is_floating_point() else targets
        return self.row_weights(f) @ self.likelihood.loss(f.double(), wide)

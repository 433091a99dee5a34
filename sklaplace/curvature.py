"""Curvature: which square root of the Hessian of the loss is propagated.

``H = Σₙ Jₙᵀ Sₙ Sₙᵀ Jₙ``: a curvature is a choice of ``S`` (b, c, k), a function
of likelihood, outputs and targets alone.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sklaplace.forward import Forward
from sklaplace.jacobians import backpropagate
from sklaplace.likelihoods import DataFit, Likelihood
from sklaplace.structures import Accumulator


def ggn(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Generalised Gauss-Newton: the exact Hessian of the loss in the outputs.

    Equal to the Fisher information for all likelihoods here (Martens 2020,
    "New insights and perspectives on the natural gradient method").
    """
    return likelihood.hessian_factor(f)


CURVATURES: dict[str, Callable[[Likelihood, Tensor, Tensor], Tensor]] = {"ggn": ggn}


def weighted(factor: Tensor, weights: Tensor | None) -> Tensor:
    """``S`` with sample weights: each row times the root of its weight."""
    if weights is None:
        return factor
    return factor * weights.sqrt().to(factor).reshape(-1, 1, 1)


def accumulate(
    forward: Forward,
    batches: Iterable[tuple[Any, Any, Tensor | None]],
    likelihood: Likelihood,
    curvature: Callable[[Likelihood, Tensor, Tensor], Tensor],
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
        Called with ``(f, S, jacobian, targets, weights)`` of every batch.

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
        used: list[Tensor] = []  # targets and columns, known once there are outputs

        def cotangents(
            f: Tensor, y: Any = y, w: Any = weights, used: Any = used
        ) -> Tensor:
            targets = likelihood.targets(y, f)
            columns = weighted(curvature(likelihood, f, targets), w)
            used += [targets, columns]
            return columns

        f, jacobian = backpropagate(forward, x, accumulator.layout, cotangents)
        if not f.isfinite().all():
            raise ValueError(
                "The network's outputs are not finite on some training rows: its "
                "training has diverged. Lower the learning rate or scale the inputs."
            )
        targets, columns = used
        accumulator.update(replace(jacobian, weights=weights))
        wide = targets.double() if targets.is_floating_point() else targets
        loss = likelihood.loss(f.double(), wide)
        row_weights = torch.ones_like(loss) if weights is None else weights.double()
        losses.append(row_weights @ loss)
        counts.append(row_weights.sum() * likelihood.n_targets(f.shape[1]))
        if observe is not None:
            observe(f, columns, jacobian, targets, weights)
    return DataFit(torch.stack(losses).sum(), torch.stack(counts).sum())

"""Predictive distributions of the outputs under a posterior over weights.

The linearised predictive (``glm``) is exact for the linearised network:
``f(x) ~ N(f* + J (mean - weights), J Σ Jᵀ)`` (Immer, Korzepa and Bauer 2021, "Improving
predictions of Bayesian neural nets via local linearization"). The Monte Carlo
predictive (``nn``) evaluates the network itself at sampled weights.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.utils.data import default_collate

from sklaplace.core import progress
from sklaplace.core.budget import CACHE
from sklaplace.core.trees import Batch, leaves, tree_rows
from sklaplace.curvature import jacobian as jac
from sklaplace.curvature.derivatives import add_axis, call_with, quiet_batching
from sklaplace.curvature.jacobian import Centring, Jacobian
from sklaplace.curvature.layout import Layout
from sklaplace.curvature.structures import projected
from sklaplace.networks.forward import Forward
from sklaplace.posterior.gaussian import GaussianPosterior

# Assumed number of intermediate values per input value in a forward pass.
ACTIVATIONS_PER_INPUT = 16

# mean, and covariance or variances
Moments = tuple[Tensor, Tensor]


class WeightDistribution(Protocol):
    """Distribution over the selected weights of a network."""

    @property
    def layout(self) -> Layout:
        """Names and shapes of the weights."""
        ...

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Return draws of the weights, (n, P), float64."""
        ...


def linearised_mean(
    posterior: GaussianPosterior, f: Tensor, jacobian: Jacobian
) -> Tensor:
    """Return the mean of the linearised outputs, (b, c), float64.

    ``f`` (b, c) and ``jacobian`` are evaluated at the network's weights. The posterior
    mean differs from them, and so do the outputs, only if a linear model was refitted.
    """
    if not posterior.is_refitted:
        return f.double()
    shift = (posterior.mean - posterior.weights).unsqueeze(-1)
    return f.double() + jacobian.matmul(shift.to(jacobian.dtype)).squeeze(-1)


def glm(
    posterior: GaussianPosterior,
    forward: Forward,
    x: Batch,
    *,
    diagonal: bool = False,
    centred: bool = False,
) -> Moments:
    """Return the mean (b, c) and covariance (b, c, c) of the linearised outputs.

    Both are float64. For a likelihood with r > 1 blocks of K outputs, the covariances
    have shape (b, r, K, K).

    Parameters
    ----------
    posterior : GaussianPosterior
        Posterior over the network's weights.
    forward : Forward
        The network, inside ``forward.frozen()``.
    x : Tensor, or dict, list or tuple of tensors
        One batch of b samples.
    diagonal : bool, default=False
        Return variances (b, c) without computing covariances.
    centred : bool, default=False
        Subtract the mean over outputs. A softmax ignores this mean, but the mean's
        variance can exceed the variances of differences by orders of magnitude.

    Notes
    -----
    The cost is one forward pass. Unless only the last layer is selected, a backward
    pass with c columns, down to the selected weights, is also required.
    """
    centring = Centring(posterior.likelihood.n_blocks) if centred else None
    n_blocks = posterior.likelihood.n_blocks  # r, each with its own softmax
    # pairs of all outputs (b, c) and the Jacobian of some outputs
    parts = jac.backpropagate_in_parts(forward, x, posterior.layout, centring)
    if not diagonal:  # covariances need all outputs at once
        parts = iter([jac.join_columns(list(parts))])
    means, covariances = [], []
    for f, jacobian in parts:
        centred_f = f if centring is None else centring.centred(f)
        outputs = centred_f.narrow(1, jacobian.first_column, jacobian.n_columns)
        means.append(linearised_mean(posterior, outputs, jacobian))
        if n_blocks > 1 and not diagonal:  # no covariances between blocks
            projection = projected(posterior.structure, jacobian, n_blocks)
            cov = projection.covariance(posterior.precision, diagonal=False)
        else:
            cov = posterior.precision.output_covariance(jacobian, diagonal=diagonal)
        covariances.append(cov)
    if len(means) == 1:  # without copies
        return means[0], covariances[0]
    return torch.cat(means, 1), torch.cat(covariances, 1)


def linearised_draws(
    posterior: GaussianPosterior, forward: Forward, x: Batch, weights: Tensor
) -> Tensor:
    """Return outputs (b, c, s) of the linearised network at weights (s, P), float64."""
    f, jacobian = jac.backpropagate(forward, x, posterior.layout)
    shifts = (weights - posterior.weights).T
    return f.double().unsqueeze(-1) + jacobian.double().matmul(shifts)


def network_draws(
    posterior: WeightDistribution, forward: Forward, x: Batch, weights: Tensor
) -> Tensor:
    """Return outputs (b, c, s) of the network itself at weights (s, P), float64.

    Each forward pass evaluates one weight sample, or as many weight samples as fit in
    the cache. Samples are evaluated one by one if vmap does not support the network;
    ``forward.takes_many`` is then False. The network's own weights do not change.
    """
    parameters = dict(forward.module.named_parameters())
    jac.require_known_layers(forward, x, posterior.layout)

    def outputs(vector: Tensor) -> Tensor:
        values = posterior.layout.unflatten(vector, forward.module)
        cast = {name: value.to(parameters[name]) for name, value in values.items()}
        return call_with(forward, cast, x).double()

    n_inputs = sum(leaf.numel() for leaf in leaves(x))
    # weight samples per forward pass: the size of the cache over that of the
    # weights and intermediate values of one weight sample, eight bytes each
    per_pass = CACHE // 8 // (weights.shape[1] + ACTIVATIONS_PER_INPUT * n_inputs)
    with torch.no_grad():
        if per_pass > 1 and forward.takes_many:
            chunks = weights.split(per_pass)
            chunks = progress.tracked(chunks, "draws", len(chunks))
            draws = _vectorised(outputs, forward, chunks)
            if draws is not None:
                return draws.movedim(0, -1)
        vectors = progress.tracked(weights, "draws", len(weights))
        return torch.stack([outputs(vector) for vector in vectors], -1)


def _vectorised(
    outputs: Callable[[Tensor], Tensor], forward: Forward, chunks: Iterable[Tensor]
) -> Tensor | None:
    """Return outputs (s, b, c) by vmap, or None if an operator has no batching rule.

    In the latter case, ``forward.takes_many`` becomes False, so that vmap is not tried
    again.
    """
    # to restore attributes that the forward pass sets to vmap's wrapped tensors
    before = [(module, dict(vars(module))) for module in forward.module.modules()]
    try:
        with quiet_batching():
            return torch.cat([vmap(outputs)(chunk) for chunk in chunks])
    except RuntimeError:  # no batching rule: evaluate the samples one by one
        forward.takes_many = False
        return None
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def moments(
    draws: Tensor, *, diagonal: bool, centred: bool, n_blocks: int = 1
) -> Moments:
    """Return the mean (b, c), and covariances (b, c, c) or variances (b, c), of draws.

    ``draws`` has shape (b, c, s). For r > 1 blocks of K outputs, the covariances have
    shape (b, r, K, K). With ``centred``, the mean over the outputs of each block is
    subtracted first, because a softmax ignores it.
    """
    blocks = draws.unflatten(1, (n_blocks, -1))
    if centred:
        blocks = blocks - blocks.mean(2, keepdim=True)
    draws = blocks.flatten(1, 2)
    mean = draws.mean(-1)
    deviations = draws - mean.unsqueeze(-1)
    n = max(1, draws.shape[-1] - 1)  # unbiased; one draw has a variance of zero
    if diagonal:
        return mean, (deviations**2).sum(-1) / n
    if n_blocks > 1:
        deviations = deviations.unflatten(1, (n_blocks, -1))
    return mean, deviations @ deviations.mT / n


def differentiable_moments(
    posterior: GaussianPosterior, forward: Forward, x: Batch, n_joint: int = 1
) -> Moments:
    """Return differentiable moments of the linearised outputs, float64.

    Groups of q = ``n_joint`` consecutive samples have the mean (b/q, q·c) and the
    covariance (b/q, q·c, q·c). The outputs of a sample are adjacent. The moments are
    differentiable with respect to ``x``, unlike the result of `glm`, which detaches its
    Jacobians.

    Notes
    -----
    The dense Jacobian has b·c·P elements and requires c backward passes per sample.
    """
    values = {name: p.detach() for name, p in forward.module.named_parameters()}
    layout = posterior.layout
    jac.require_known_layers(forward, x, layout)
    # only derivatives with respect to these weights are computed
    selected = {block.name: values[block.name] for block in layout.blocks}

    def outputs(values: dict[str, Tensor], row: Batch) -> tuple[Tensor, Tensor]:
        f = call_with(forward, values, add_axis(row))[0]
        return f, f  # to differentiate, and to return unchanged

    # row -> (Jacobian (c, ...) by parameter name, outputs (c,))
    linearised = partial(jacrev(outputs, has_aux=True), selected)
    try:
        with quiet_batching():
            rows, f = vmap(linearised)(x)
    except RuntimeError:  # no batching rule: evaluate the samples one by one
        n_rows = len(next(leaves(x)))
        try:
            pairs = [linearised(tree_rows(x, n)) for n in range(n_rows)]
        except RuntimeError as error:
            # torch.func transforms refuse this method
            if "requires_grad_" not in str(error):
                raise
            raise ValueError(
                "The network calls requires_grad_, which predictive does not support. "
                "Use torch.func.grad instead, or call latent_mean_and_variance."
            ) from error
        rows, f = default_collate(pairs)
    jacobian = layout.flatten(rows[block.name] for block in layout.blocks).double()
    mean = f.double() + jacobian @ (posterior.mean - posterior.weights)
    # (b, c, ...) to (b/q, q·c, ...)
    mean, jacobian = (
        rows.unflatten(0, (-1, n_joint)).flatten(1, 2) for rows in (mean, jacobian)
    )
    return mean, posterior.precision.covariance_of_rows(jacobian)

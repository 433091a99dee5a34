"""Curvature: the generalised Gauss-Newton matrix, Fisher matrices and the Hessian.

``H = Σₙ Jₙᵀ Sₙ Sₙᵀ Jₙ``: a curvature is a choice of ``S`` (b, c, k), a square root of
the Hessian of the loss in the outputs, from likelihood, outputs and targets. The exact
Hessian adds the second derivatives of the network, and is summed as a matrix.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.checks import Check, check_count
from sklaplace.core.random import counter_uniforms, row_hash
from sklaplace.likelihoods.base import Likelihood, output_weights
from sklaplace.likelihoods.output_hessian import Diagonal, Factored, OutputHessian

# targets drawn for each sample
N_DRAWS = 10


def ggn(likelihood: Likelihood, f: Tensor, y: Tensor, keys: Tensor) -> Tensor:
    """Generalised Gauss-Newton: the exact Hessian of the loss in the outputs.

    Equal to the Fisher information for all likelihoods here (Martens 2020,
    "New insights and perspectives on the natural gradient method").
    """
    return _weight_outputs(likelihood.hessian_factor(f), likelihood, y)


def ef(likelihood: Likelihood, f: Tensor, y: Tensor, keys: Tensor) -> Tensor:
    """Empirical Fisher: the gradient of the loss at the training targets, k = 1.

    Cheap, but no approximation of the Hessian: it vanishes where targets are fitted
    (Kunstner, Balles and Hennig 2019, "Limitations of the empirical Fisher
    approximation"). Of second order in the scale of the loss: ``Σ (f - y)² JᵀJ / σ⁴``
    for one output with Gaussian noise.
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
    """Monte-Carlo Fisher: gradients at ``n_draws`` targets drawn from the likelihood.

    Unbiased for the generalised Gauss-Newton matrix, with k = ``n_draws`` in place of
    c columns; for hundreds of classes. The draws of a sample depend on the seed and on
    its inputs, not on the batch.
    """
    noise = counter_uniforms(keys, n_draws * likelihood.n_draws(f.shape[-1]), seed)
    parts = noise.to(f.device).chunk(n_draws, -1)
    columns = [likelihood.score(f, likelihood.draw(f, part)) for part in parts]
    root = torch.stack(columns, -1) * float(n_draws**-0.5)
    return _weight_outputs(root, likelihood, y)


def identity(likelihood: Likelihood, f: Tensor, y: Tensor, keys: Tensor) -> Tensor:
    """Identity in place of the Hessian of the loss in the outputs, ``Σ w JᵀJ``.

    Weights of samples and of single outputs count, the loss does not: neither how
    confident the network is nor the targets. In units of the noise as `ggn`, which it
    equals for a Gaussian. It is at least `ggn` for probabilities of classes, where no
    eigenvalue of ``Λ`` exceeds one. After Zhdanov, Dereka and Kolesnikov (2023),
    "Identity curvature Laplace approximation for improved out-of-distribution
    detection".
    """
    return identity_hessian(likelihood, f, y).factor()


def _weight_outputs(root: Tensor, likelihood: Likelihood, y: Tensor) -> Tensor:
    """``S`` times the square roots of the weights of single outputs, if any."""
    weights = output_weights(likelihood, y, root.shape[1])
    return root if weights is None else root * weights.sqrt().to(root).unsqueeze(-1)


def ggn_hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> OutputHessian:
    """``S Sᵀ`` of `ggn`, in closed form."""
    return likelihood.hessian(f).scaled(output_weights(likelihood, y, f.shape[1]))


def identity_hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> OutputHessian:
    """``S Sᵀ`` of `identity`, in closed form."""
    # noise levels of outputs are units of theirs, as their common factor is
    ones = Diagonal(torch.ones_like(f))
    unit = likelihood.hessian(f) if likelihood.has_noise else ones
    return unit.scaled(output_weights(likelihood, y, f.shape[1]))


@dataclass(frozen=True)
class Curvature:
    """An approximation of the Hessian of the loss, with its options.

    Attributes
    ----------
    root : callable
        ``(likelihood, f, y, keys, **options) -> S`` (b, c, k).
    closed_form : callable or None
        ``(likelihood, f, y) -> OutputHessian`` where ``S Sᵀ`` need not be written out.
    order : int
        Power of ``likelihood.scale`` by which the posterior multiplies it.
    is_exact : bool
        Whether the network's own second derivatives are added.
    is_random : bool
        Whether it has an option ``seed``.
    checks : mapping
        Options that users may set, each with a check of its value.
    options : mapping
        Values of the options.
    """

    root: Callable[..., Tensor]
    closed_form: Callable[[Likelihood, Tensor, Tensor], OutputHessian] | None = None
    order: int = 1
    is_exact: bool = False
    is_random: bool = False
    checks: Mapping[str, Check] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def configured(self, options: Mapping[str, Any], seed: int) -> "Curvature":
        """A copy with options and, where it is random, a seed."""
        known = {"seed": seed, **options} if self.is_random else dict(options)
        return replace(self, options=known)

    def __call__(
        self, likelihood: Likelihood, f: Tensor, y: Tensor, keys: Tensor | None = None
    ) -> Tensor:
        """``S`` (b, c, k); without keys the draws depend on the outputs."""
        keys = row_hash(f) if keys is None else keys
        return self.root(likelihood, f, y, keys, **self.options)


CURVATURES: dict[str, Curvature] = {
    "ef": Curvature(ef, order=2),
    "ggn": Curvature(ggn, ggn_hessian),
    "ggn_mc": Curvature(ggn_mc, is_random=True, checks={"n_draws": check_count}),
    # outputs are linear in the weights of a head: there it is the GGN
    "hessian": Curvature(ggn, ggn_hessian, is_exact=True),
    "identity": Curvature(identity, identity_hessian),
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
    """``w S Sᵀ`` for each sample, in closed form where there is one."""
    if curvature.closed_form is not None:
        return curvature.closed_form(likelihood, f, y).weighted(weights)
    return Factored(curvature(likelihood, f, y, keys)).weighted(weights)

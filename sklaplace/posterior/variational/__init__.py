"""Distributions over weights for Bayes by Backprop: posteriors, priors, divergence.

A network's P weights have a posterior ``q(w) = Π_p q_p(w_p)`` whose parameters minimise

``E_q[−log p(y | X, w)] + KL(q ‖ p)``,

by stochastic gradients through draws ``w = g(parameters, noise)``:

* ``'gaussian'``: ``w = μ + σ ε``, ``ε ~ N(0, 1)``.
* ``'kumaraswamy'``: ``w = bound · (2x − 1)``, ``x = (1 − U^{1/b})^{1/a}``.
* ``'quantile'``: ``w = μ + σ (ε + Σ_k v_k tanh(s_k (ε − c_k)))``.
* ``'density'``: ``w = μ + σ z``, ``log q(z) = −z²/2 + Σ_k v_k φ_k(z) + constant`` at
  the nodes of a grid, and ``q`` linear between them.

All but the first are experimental. Modules need nothing beyond torch; draws take a
``torch.Generator``, and leave the global random state alone if they are given one.

References
----------
Blundell, Cornebise, Kavukcuoglu, Wierstra (2015), "Weight uncertainty in neural
networks", ICML.
"""

from sklaplace.posterior.variational.base import WeightPosterior
from sklaplace.posterior.variational.density import Density
from sklaplace.posterior.variational.divergence import (
    check_support,
    divergence,
    exact_divergence,
)
from sklaplace.posterior.variational.gaussian import MeanFieldGaussian
from sklaplace.posterior.variational.kumaraswamy import Kumaraswamy
from sklaplace.posterior.variational.priors import (
    PRIORS,
    GaussianPrior,
    ScaleMixturePrior,
    UniformPrior,
    WeightPrior,
)
from sklaplace.posterior.variational.quantile import Quantile

POSTERIORS: dict[str, type[WeightPosterior]] = {
    "density": Density,
    "gaussian": MeanFieldGaussian,
    "kumaraswamy": Kumaraswamy,
    "quantile": Quantile,
}
"""Posteriors by the name that ``posterior`` takes."""

__all__ = [
    "POSTERIORS",
    "PRIORS",
    "Density",
    "GaussianPrior",
    "Kumaraswamy",
    "MeanFieldGaussian",
    "Quantile",
    "ScaleMixturePrior",
    "UniformPrior",
    "WeightPosterior",
    "WeightPrior",
    "check_support",
    "divergence",
    "exact_divergence",
]

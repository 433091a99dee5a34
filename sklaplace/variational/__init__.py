"""Bayes by Backprop: mean-field posteriors over weights, trained by gradients.

Training minimises the negative evidence lower bound
``E_q[−log p(y | X, w)] + KL(q ‖ p)`` over the parameters of ``q(w) = Π_p q_p(w_p)``.
Stochastic gradients pass through draws ``w = g(parameters, noise)``. The registries
`POSTERIORS` and `PRIORS` list the families of ``q`` and of the prior ``p``. All
posteriors except the Gaussian are experimental. `module` puts drawn weights into a
network, and `elbo` trains the network with skorch.

* ``'gaussian'``: ``w = μ + σ ε``, ``ε ~ N(0, 1)``.
* ``'kumaraswamy'``: ``w = bound · (2x − 1)``, ``x = (1 − U^{1/b})^{1/a}``.
* ``'quantile'``: ``w = μ + σ (ε + Σ_k v_k tanh(s_k (ε − c_k)))``.
* ``'density'``: ``w = μ + σ z``, ``log q(z) = −z²/2 + Σ_k v_k φ_k(z) + constant`` at
  the nodes of a grid, and ``q`` is linear between them.

References
----------
Blundell, Cornebise, Kavukcuoglu, Wierstra (2015), "Weight uncertainty in neural
networks", ICML.
"""

from sklaplace.variational.base import WeightPosterior
from sklaplace.variational.density import Density
from sklaplace.variational.gaussian import MeanFieldGaussian
from sklaplace.variational.kumaraswamy import Kumaraswamy
from sklaplace.variational.priors import (
    PRIORS,
    GaussianPrior,
    ScaleMixturePrior,
    UniformPrior,
    WeightPrior,
)
from sklaplace.variational.quantile import Quantile

POSTERIORS: dict[str, type[WeightPosterior]] = {
    kind.name: kind for kind in (Density, MeanFieldGaussian, Kumaraswamy, Quantile)
}
"""Posterior families, by the value of the parameter ``posterior``."""

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
]

"""Mean-field Gaussian: ``w = μ + σ ε`` with ``ε ~ N(0, 1)``, ``σ = softplus(ρ)``.

The log density is ``log q(w) = −ε²/2 − log σ − log √(2π)``, and the entropy is
``log σ + log √(2πe)``.
"""

from typing import ClassVar

from torch import Tensor

from sklaplace.variational.base import LOG_ROOT_TWO_PI, LocationScale


class MeanFieldGaussian(LocationScale):
    """Independent Gaussian for each weight, as in the Bayes by Backprop paper.

    This is the default and cheapest family. Moments, entropy and the divergence from a
    Gaussian prior have closed forms. A Gaussian has a single mode and thin tails.

    Read more in the :doc:`User Guide </research/weight_posteriors>`.

    Parameters
    ----------
    location : Tensor of shape (P,)
        Initial means.
    scale : Tensor of shape (P,)
        Initial standard deviations, positive.
    bound : float, default=3.0
        Ignored, because the support is unbounded.

    Raises
    ------
    ValueError
        If shapes, numbers or the bound are invalid; see `WeightPosterior`.

    See Also
    --------
    WeightPosterior : Interface of all families.
    Quantile : Family with non-Gaussian shapes.

    Notes
    -----
    Each weight has two parameters. Drawing s samples takes O(s P) time and memory.

    References
    ----------
    Blundell, Cornebise, Kavukcuoglu, Wierstra (2015), "Weight uncertainty in neural
    networks", ICML, section 3.2.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.variational import MeanFieldGaussian
    >>> q = MeanFieldGaussian(torch.zeros(3), torch.full((3,), 0.1))
    >>> w, log_q = q.sample(5, torch.Generator().manual_seed(0))
    >>> w.shape, log_q.shape
    (torch.Size([5, 3]), torch.Size([5, 3]))
    """

    name: ClassVar[str] = "gaussian"
    is_experimental: ClassVar[bool] = False
    is_closed_form_cheap: ClassVar[bool] = True

    def __init__(self, location: Tensor, scale: Tensor, bound: float = 3.0) -> None:
        super().__init__(location, scale, bound)

    def median(self) -> Tensor:
        """Return the medians, (P,)."""
        return self.location

    def closed_form(self) -> tuple[Tensor, Tensor]:
        """Return entropies in nats and ``E[w²]``, (P,) each, in closed form."""
        scale = self.scale
        entropy = scale.log() + (LOG_ROOT_TWO_PI + 0.5)
        return entropy, self.location.square() + scale.square()

    def _transform_z(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        return noise, self._log_prob_z(noise)

    def _log_prob_z(self, z: Tensor) -> Tensor:
        return z.square() * -0.5 - LOG_ROOT_TWO_PI

    def _moments(self) -> tuple[float, float]:
        return 0.0, 1.0

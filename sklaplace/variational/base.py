"""Mean-field distributions over weights, with reparameterised draws.

The distribution is ``q(w) = Π_p q_p(w_p)`` over P weights. A draw ``w = g(ε)`` is a
differentiable function of the parameters and of noise ``ε``. ``E_q[∇ f(g(ε))]`` is
therefore the gradient of ``E_q[f(w)]`` (the pathwise, or reparameterisation, gradient).
In a location-scale family, ``w = μ + σ z`` with ``σ = softplus(ρ)``, and
``log q(w) = log p(z) − log σ``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from sklaplace.core.checks import Check, check_count, check_positive

LOG_ROOT_TWO_PI = 0.5 * math.log(2 * math.pi)
# Added to softplus, which rounds to zero for very negative values. The logarithm then
# stays finite, and the reciprocal of this number does not overflow in float32.
_SMALLEST = 1e-30


class WeightPosterior(nn.Module, ABC):
    """Mean-field distribution over P weights, with learned parameters.

    This is the base class for custom families, which `VariationalClassifier` accepts as
    ``posterior``. The constructor of a subclass accepts ``location``, ``scale`` and
    ``bound``, and creates the parameters. A subclass defines `transform`, `log_prob`,
    `median`, `mean` and `variance`. A subclass with non-normal noise also defines
    `noise`.

    Read more in the :doc:`User Guide </research/weight_posteriors>`.

    Parameters
    ----------
    location : Tensor of shape (P,)
        Initial medians, which set the dtype and device of the parameters.
    scale : Tensor of shape (P,)
        Initial standard deviations, positive.
    bound : float, default=3.0
        Bound of the support ``(-bound, bound)``; ignored unless ``is_bounded``.

    Attributes
    ----------
    n_weights : int
        Number of weights, P.
    name : str
        Key in `POSTERIORS`; by default, the name of the class.
    is_bounded : bool
        Whether the support is ``(-bound, bound)``.
    is_experimental : bool
        Whether the family has not yet shown an advantage over a Gaussian.
    is_closed_form_cheap : bool
        Whether `closed_form` costs less than a draw. If so, training uses the closed
        form.
    checks : mapping of str to callable
        Constructor options that ``posterior_params`` can set. The values are functions
        of ``(name, value)`` that raise an error if the value is invalid.

    Raises
    ------
    ValueError
        If the shapes differ or are not (P,), if numbers are not finite, or if the
        scales or the bound are not positive.

    See Also
    --------
    MeanFieldGaussian : Default family.
    sklaplace.VariationalClassifier : Learns a posterior over the weights of a network.

    Notes
    -----
    Custom families are checked before training. Draws must be finite, differentiable
    and reproducible. All shapes and dtypes must be correct. `log_prob` must agree with
    `sample`, and `variance` must roughly agree with the draws. Medians must start at
    ``location``.

    References
    ----------
    Blundell, Cornebise, Kavukcuoglu, Wierstra (2015), "Weight uncertainty in neural
    networks", ICML.

    Examples
    --------
    Logistic distributions have heavier tails than Gaussians:

    >>> import math
    >>> import torch
    >>> from torch import nn
    >>> from torch.nn.functional import logsigmoid
    >>> from sklaplace.variational import WeightPosterior
    >>> class Logistic(WeightPosterior):
    ...     def __init__(self, location, scale, bound=3.0):
    ...         super().__init__(location, scale, bound)
    ...         self.location = nn.Parameter(location.clone())
    ...         self.log_scale = nn.Parameter((scale * 3**0.5 / math.pi).log())
    ...
    ...     def noise(self, n, generator=None):
    ...         x = super().noise(n, generator)  # normal
    ...         return torch.special.log_ndtr(x) - torch.special.log_ndtr(-x)
    ...
    ...     def transform(self, noise):
    ...         w = self.location + self.log_scale.exp() * noise
    ...         return w, logsigmoid(noise) + logsigmoid(-noise) - self.log_scale
    ...
    ...     def log_prob(self, w):
    ...         z = (w - self.location) / self.log_scale.exp()
    ...         return logsigmoid(z) + logsigmoid(-z) - self.log_scale
    ...
    ...     def median(self):
    ...         return self.location
    ...
    ...     def mean(self):
    ...         return self.location
    ...
    ...     def variance(self):
    ...         return (math.pi * self.log_scale.exp()) ** 2 / 3
    >>> q = Logistic(torch.zeros(3), torch.full((3,), 0.1))
    >>> w, log_q = q.sample(5, torch.Generator().manual_seed(0))
    >>> w.shape, torch.allclose(log_q, q.log_prob(w), atol=1e-5)
    (torch.Size([5, 3]), True)
    """

    name: ClassVar[str]
    is_bounded: ClassVar[bool] = False
    is_experimental: ClassVar[bool] = True
    is_closed_form_cheap: ClassVar[bool] = False
    checks: ClassVar[Mapping[str, Check]] = {}
    # torch.randn or torch.rand
    _noise: ClassVar[Callable[..., Tensor]] = staticmethod(torch.randn)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = vars(cls).get("name", cls.__name__)

    def __init__(self, location: Tensor, scale: Tensor, bound: float = 3.0) -> None:
        super().__init__()
        if location.ndim != 1 or location.shape != scale.shape or not len(location):
            raise ValueError(
                f"location has shape {tuple(location.shape)} and scale "
                f"{tuple(scale.shape)}. Pass tensors (P,) with one value per weight."
            )
        if not (location.isfinite() & scale.isfinite() & (scale > 0)).all():
            raise ValueError(
                "location or scale has a value that is not finite, or scale is not "
                "positive. Pass weights, and standard deviations such as 0.05."
            )
        check_positive("bound", bound)
        self.n_weights = len(location)
        self.bound = float(bound)

    def sample(
        self, n: int = 1, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return differentiable draws of the weights and their log densities.

        Parameters
        ----------
        n : int, default=1
            Number of draws, s.
        generator : torch.Generator or None
            Source of randomness, on any device. By default, the global generator.

        Returns
        -------
        w : Tensor of shape (s, P)
            Draws of the weights.
        log_q : Tensor of shape (s, P)
            Log density of each weight in nats. Gradients flow to the parameters
            directly and through the draw.

        Raises
        ------
        ValueError
            If ``n`` is not a positive integer.

        See Also
        --------
        transform : Weights as a function of noise.
        log_prob : Log densities at other weights.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.variational import MeanFieldGaussian
        >>> q = MeanFieldGaussian(torch.zeros(3), torch.full((3,), 0.1))
        >>> w, log_q = q.sample(5, torch.Generator().manual_seed(0))
        >>> w.shape, log_q.shape
        (torch.Size([5, 3]), torch.Size([5, 3]))
        """
        return self.transform(self.noise(n, generator))

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw noise for `transform`.

        Parameters
        ----------
        n : int
            Number of draws, s.
        generator : torch.Generator or None
            Source of randomness. The noise is drawn on the generator's device. By
            default, the global generator.

        Returns
        -------
        Tensor of shape (s, P)
            Noise on the device of the parameters.

        See Also
        --------
        sample : Draw noise and transform it.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.variational import MeanFieldGaussian
        >>> q = MeanFieldGaussian(torch.zeros(3), torch.full((3,), 0.1))
        >>> q.noise(5, torch.Generator().manual_seed(0)).shape
        torch.Size([5, 3])
        """
        check_count("n", n)
        parameter = next(self.parameters())
        device = parameter.device if generator is None else generator.device
        options = {"generator": generator, "dtype": parameter.dtype, "device": device}
        return self._noise((n, self.n_weights), **options).to(parameter.device)

    @abstractmethod
    def transform(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights as a function of noise.

        Parameters
        ----------
        noise : Tensor of shape (s, P)
            Noise from `noise`.

        Returns
        -------
        w : Tensor of shape (s, P)
            Weights ``g(ε)``.
        log_q : Tensor of shape (s, P)
            Log densities of the weights, in nats.

        See Also
        --------
        sample : Draw noise and transform it.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.variational import MeanFieldGaussian
        >>> q = MeanFieldGaussian(torch.zeros(3), torch.full((3,), 0.1))
        >>> w, _ = q.transform(torch.ones(1, 3))  # one standard deviation above
        >>> w.detach()
        tensor([[0.1000, 0.1000, 0.1000]])
        """

    @abstractmethod
    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log density of each weight.

        Parameters
        ----------
        w : Tensor of shape (..., P)
            Weights.

        Returns
        -------
        Tensor of shape (..., P)
            Log densities in nats; −inf outside the support.

        See Also
        --------
        sample : Draws with their log densities.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.variational import MeanFieldGaussian
        >>> q = MeanFieldGaussian(torch.zeros(3), torch.full((3,), 0.1))
        >>> q.log_prob(torch.zeros(3)).detach().round(decimals=2)
        tensor([1.3800, 1.3800, 1.3800])
        """

    @abstractmethod
    def median(self) -> Tensor:
        """Return the medians of the weights.

        Returns
        -------
        Tensor of shape (P,)
            Medians, which become the network's weights after training.

        See Also
        --------
        mean : Means of the weights.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.variational import MeanFieldGaussian
        >>> q = MeanFieldGaussian(torch.zeros(3), torch.full((3,), 0.1))
        >>> q.median().detach()
        tensor([0., 0., 0.])
        """

    @abstractmethod
    def mean(self) -> Tensor:
        """Return the means of the weights.

        Returns
        -------
        Tensor of shape (P,)
            Means, computed in closed form or by quadrature.

        See Also
        --------
        median : Medians.
        variance : Variances.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.variational import MeanFieldGaussian
        >>> q = MeanFieldGaussian(torch.zeros(3), torch.full((3,), 0.1))
        >>> q.mean().detach()
        tensor([0., 0., 0.])
        """

    @abstractmethod
    def variance(self) -> Tensor:
        """Return the variances of the weights.

        Returns
        -------
        Tensor of shape (P,)
            Variances, computed in closed form or by quadrature.

        See Also
        --------
        mean : Means of the weights.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.variational import MeanFieldGaussian
        >>> q = MeanFieldGaussian(torch.zeros(3), torch.full((3,), 0.1))
        >>> q.variance().detach().round(decimals=3)
        tensor([0.0100, 0.0100, 0.0100])
        """

    def closed_form(self) -> tuple[Tensor, Tensor] | None:
        """Return the entropies and second moments if they have closed forms.

        Returns
        -------
        tuple of two Tensors of shape (P,), or None
            Entropies in nats, and second moments ``E[w²]``. The base class returns
            None.

        See Also
        --------
        log_prob : Log density; its negative expectation is the entropy.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.variational import MeanFieldGaussian
        >>> q = MeanFieldGaussian(torch.zeros(3), torch.full((3,), 0.1))
        >>> entropy, second_moment = q.closed_form()
        >>> second_moment.detach().round(decimals=3)
        tensor([0.0100, 0.0100, 0.0100])
        """
        return None


class LocationScale(WeightPosterior):
    """Weights ``w = μ + σ z`` with a random variable ``z`` for each weight.

    Subclasses define the distribution of ``z`` by four methods. `_init_z` creates the
    parameters of this distribution, with the sizes in ``options``. `_transform_z`,
    `_log_prob_z` and `_moments` correspond to the public methods for ``w``.
    """

    def __init__(
        self, location: Tensor, scale: Tensor, bound: float = 3.0, **options: int
    ) -> None:
        super().__init__(location, scale, bound)
        for name, value in options.items():  # raise an error for invalid sizes
            self.checks[name](name, value)
        self.location = nn.Parameter(location.detach().clone())
        self._init_z(self.location.detach(), **options)
        with torch.no_grad():
            # the standard deviation of w is σ times that of z, and should be ``scale``
            sigma = scale / self._moments()[1] ** 0.5
            self.raw_scale = nn.Parameter(inverse_softplus(sigma).to(self.location))

    def _init_z(self, like: Tensor, **options: int) -> None:
        """Create the parameters of ``z``, by default none.

        They have the dtype and device of ``like`` (P,).
        """

    @property
    def scale(self) -> Tensor:
        """Scales ``σ`` of the weights, (P,).

        See Also
        --------
        WeightPosterior.variance : Variances, defined for all families.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.variational import MeanFieldGaussian
        >>> q = MeanFieldGaussian(torch.zeros(3), torch.full((3,), 0.1))
        >>> q.scale.detach()
        tensor([0.1000, 0.1000, 0.1000])
        """
        return positive(self.raw_scale)

    def transform(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights ``g(ε)`` and log densities, (s, P) each, from noise (s, P)."""
        z, log_p = self._transform_z(noise)
        scale = self.scale
        return torch.addcmul(self.location, scale, z), log_p - scale.log()

    def log_prob(self, w: Tensor) -> Tensor:
        """Return log densities of weights (..., P), in nats.

        Log densities outside the support are −inf.
        """
        scale = self.scale
        return self._log_prob_z((w - self.location) / scale) - scale.log()

    def mean(self) -> Tensor:
        """Return the means, (P,)."""
        return self.location + self.scale * self._moments()[0]

    def variance(self) -> Tensor:
        """Return the variances, (P,)."""
        return self.scale.square() * self._moments()[1]

    @abstractmethod
    def _transform_z(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return draws of ``z`` and log densities, (s, P) each, from noise (s, P)."""

    @abstractmethod
    def _log_prob_z(self, z: Tensor) -> Tensor:
        """Return the log density of ``z`` (..., P), in nats."""

    @abstractmethod
    def _moments(self) -> tuple[Tensor | float, Tensor | float]:
        """Return the mean and variance of ``z``: (P,), or a number for all weights."""


def positive(raw: Tensor) -> Tensor:
    """Return ``softplus(raw)``, kept above zero."""
    return softplus(raw).add_(_SMALLEST)


def inverse_softplus(x: Tensor) -> Tensor:
    """Return ``r`` with ``softplus(r) = x`` for positive ``x``, without overflow."""
    return x + (-torch.expm1(-x)).log()


def spread(n: int, outermost: float) -> Tensor:
    """Return ``n`` evenly spaced values within ``±outermost``, or zero if n = 1."""
    if n == 1:
        return torch.zeros(1, dtype=torch.float64)
    return torch.linspace(-outermost, outermost, n, dtype=torch.float64)

"""The family of a weight posterior: a name, a class or an instance, and its options."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.checks import check_option, check_params, check_positive, listed
from sklaplace.posterior.variational import POSTERIORS
from sklaplace.posterior.variational.base import WeightPosterior
from sklaplace.posterior.variational.divergence import check_support
from sklaplace.posterior.variational.priors import WeightPrior

# Largest median difference, in nats, between the log densities of draws and those of
# `log_prob` at them: in float32 they differ by about 1e-5.
_TOLERANCE = 1e-2
# Largest median ratio of variances to those of draws, either way. Of two draws of a
# Gaussian it is 2.2, and of Student's t with 2.1 degrees of freedom 23.
_LARGEST_RATIO = 30.0
# Numbers that are drawn for it.
_DRAWN = 1_000_000


@dataclass(frozen=True)
class PosteriorFamily:
    """What posteriors are made from, for the weights of any network.

    Attributes
    ----------
    given : str, subclass or instance of WeightPosterior
        Key of ``POSTERIORS``, a class, or an instance for the weights of one network.
    bound : float
        Bound of the weights, of bounded families; an instance has its own.
    options : mapping or None
        Further arguments of the class.
    """

    given: str | type[WeightPosterior] | WeightPosterior
    bound: float = 3.0
    options: Mapping[str, Any] | None = None

    @property
    def kind(self) -> type[WeightPosterior]:
        """The class."""
        if isinstance(self.given, str):
            return POSTERIORS[self.given]
        return self.given if isinstance(self.given, type) else type(self.given)

    def check(self, prior: WeightPrior) -> None:
        """Raise for what is no family, for its options, and its support."""
        given, base = self.given, WeightPosterior
        is_class = isinstance(given, type) and issubclass(given, base)
        if not is_class and not isinstance(given, base):
            others = (
                f", or a subclass or an instance of {base.__module__}.{base.__name__}"
            )
            check_option("posterior", given, POSTERIORS, others.replace(".base.", "."))
        if inspect.isabstract(self.kind):
            raise TypeError(
                f"posterior={self.kind.__name__} lacks "
                f"{listed(self.kind.__abstractmethods__)}. Define these methods."
            )
        check_positive("bound", self.bound)
        if isinstance(given, base) and self.options:
            raise ValueError(
                "posterior_params are given, but posterior is an instance, which has "
                "its options. Pass its class, or leave posterior_params out."
            )
        of = f"posterior={self.kind.name!r}"
        check_params("posterior_params", self.options, self.kind.checks, of)
        check_support(given if isinstance(given, base) else self.kind, prior)

    def start(self, location: Tensor, scale: Tensor) -> WeightPosterior:
        """Return a posterior with initial medians and standard deviations, (P,) each.

        A copy of an instance starts where that is. Families of the user are checked.
        """
        if isinstance(self.given, WeightPosterior):
            found = self._copied(self.given, location)
        else:
            found = self._made(location, scale)
        if type(found) not in POSTERIORS.values():
            _check_draws(found)
        is_near = (found.median().detach() - location).abs() <= scale
        if isinstance(self.given, type) and not is_near.all():
            raise ValueError(
                f"posterior={self.kind.name!r} does not start at the network's "
                "weights: its initial medians are more than the given standard "
                "deviations from location. Set its parameters by location and scale."
            )
        return found

    def _made(self, location: Tensor, scale: Tensor) -> WeightPosterior:
        """Return an instance of the class."""
        given, options = (location, scale, self.bound), dict(self.options or {})
        try:
            inspect.signature(self.kind).bind(*given, **options)
        except TypeError as error:
            names = ", ".join(["self, location, scale, bound=3.0", *options])
            raise TypeError(
                f"The constructor of posterior={self.kind.name!r} does not take what "
                f"it is given: {error}. Define __init__({names})."
            ) from error
        return self.kind(*given, **options)

    @staticmethod
    def _copied(given: WeightPosterior, like: Tensor) -> WeightPosterior:
        """Return a copy of an instance that can be trained, of a location's dtype."""
        if given.n_weights != len(like):
            raise ValueError(
                f"posterior is an instance for {given.n_weights:,} weights, but the "
                f"network has {len(like):,} that require gradients. Pass its class, or "
                "an instance for this network."
            )
        return copy.deepcopy(given).to(like).requires_grad_(True)


def _check_draws(posterior: WeightPosterior) -> None:
    """Raise for draws and log densities that training could not use."""
    w, log_q, again = _drawn(posterior)
    faults = {
        "has_gradients": "are not differentiable functions of its parameters",
        "is_finite": "are not finite, or their log densities are not",
        "is_repeatable": "are not functions of the generator that noise is given",
    }
    holds = {
        "has_gradients": w.requires_grad and log_q.requires_grad,
        "is_finite": bool(w.isfinite().all() and log_q.isfinite().all()),
        "is_repeatable": torch.equal(w, again),
    }
    name = f"posterior={posterior.name!r}"
    for key, fault in faults.items():
        if not holds[key]:
            raise ValueError(f"Draws of {name} {fault}. See WeightPosterior.")
    error = (posterior.log_prob(w) - log_q).detach().abs().median()
    if not error <= _TOLERANCE:
        raise ValueError(
            f"log_prob of {name} differs from the log densities of its draws, by "
            f"{float(error):.2g} nats. Return log q(w) per weight from both."
        )
    _check_moments(posterior, w.dtype)


def _check_moments(posterior: WeightPosterior, dtype: torch.dtype) -> None:
    """Raise for moments that are not real numbers, (P,), or not those of draws."""
    name, shape = f"posterior={posterior.name!r}", (posterior.n_weights,)
    moments = {key: getattr(posterior, key)() for key in ("median", "mean", "variance")}
    for key, value in moments.items():
        is_tensor = isinstance(value, Tensor)
        if not is_tensor or value.shape != shape or value.dtype != dtype:
            found = type(value).__name__
            if is_tensor:
                found = f"{tuple(value.shape)} of {value.dtype}"
            raise ValueError(
                f"{key} of {name} is {found}. Return a tensor of shape {shape} of "
                f"{dtype}, the type of the draws."
            )
    n_draws = max(2, min(_DRAWN // posterior.n_weights, 1000))
    with torch.no_grad():
        w, _ = posterior.sample(n_draws, torch.Generator().manual_seed(1))
        ratio = float((moments["variance"] / w.var(0)).median())
    # an infinite variance is no fault
    if not 1 / _LARGEST_RATIO <= ratio <= _LARGEST_RATIO and ratio != float("inf"):
        raise ValueError(
            f"variance of {name} is {ratio:.2g} times that of its draws. Return the "
            "variance of each weight."
        )


@torch.enable_grad()
def _drawn(posterior: WeightPosterior) -> tuple[Tensor, Tensor, Tensor]:
    """Return draws, their log densities, and draws under the same seed, (2, P) each."""
    generators = (torch.Generator().manual_seed(0) for _ in range(2))
    first, second = (posterior.sample(2, generator) for generator in generators)
    shape = (2, posterior.n_weights)
    found = [tuple(part.shape) for part in first]
    if found != [shape, shape] or tuple(posterior.median().shape) != shape[1:]:
        raise ValueError(
            f"posterior={posterior.name!r} gives draws, log densities and medians of "
            f"shapes {found[0]}, {found[1]} and {tuple(posterior.median().shape)} for "
            f"two draws of {shape[1]:,} weights. Return {shape}, {shape} and "
            f"{shape[1:]}: one log density for each weight."
        )
    return (*first, second[0])

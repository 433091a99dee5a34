"""Family of weight posteriors: a name, a class or an instance, with its options."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.checks import check_option, check_params, check_positive
from sklaplace.variational import POSTERIORS
from sklaplace.variational.base import WeightPosterior
from sklaplace.variational.divergence import check_support
from sklaplace.variational.priors import WeightPrior

# Largest median difference, in nats, between `log_prob` and the log densities of draws.
# The difference is about 1e-5 in float32.
_TOLERANCE = 1e-2
# Largest median ratio of `variance` to the variances of draws; its reciprocal is the
# smallest. For two draws, the ratio is 2.2 for a Gaussian and 23 for a Student t
# distribution with 2.1 degrees of freedom.
_LARGEST_RATIO = 30.0
# Number of values drawn for the ratio.
_DRAWN = 1_000_000
_OTHERS = ", or a subclass or an instance of WeightPosterior"
_ADVICE = "See WeightPosterior for what each method must return."


@dataclass(frozen=True)
class PosteriorFamily:
    """Recipe for the posterior over the weights of any network.

    Attributes
    ----------
    posterior : str, subclass or instance of WeightPosterior
        Key of ``POSTERIORS``, a class, or an instance for the weights of one network.
    bound : float
        Bound of the weights in bounded families; an instance has its own bound.
    options : mapping or None
        Additional arguments of the class.
    """

    posterior: str | type[WeightPosterior] | WeightPosterior
    bound: float = 3.0
    options: Mapping[str, object] | None = None

    @property
    def kind(self) -> type[Any]:
        """Class of the posterior, or str for an unknown name, which `check` rejects."""
        if isinstance(self.posterior, str):
            return POSTERIORS.get(self.posterior, str)
        if isinstance(self.posterior, type):
            return self.posterior
        return type(self.posterior)

    def check(self, prior: WeightPrior) -> None:
        """Raise an error for an unknown family, bad options or an unsuitable prior."""
        # `kind` is str for an unknown name, which `check_option` rejects
        if not issubclass(self.kind, WeightPosterior):
            check_option("posterior", self.posterior, POSTERIORS, _OTHERS)
        check_positive("bound", self.bound)
        posterior: WeightPosterior | type[WeightPosterior] = self.kind
        checks, owner = self.kind.checks, f"posterior={self.kind.name!r}"
        if isinstance(self.posterior, WeightPosterior):
            posterior = self.posterior
            # an instance exists already, so no constructor option is valid
            checks, owner = {}, f"an instance of {self.kind.name!r}"
        check_params("posterior_params", self.options, checks, owner)
        check_support(posterior, prior)

    def start(self, location: Tensor, scale: Tensor) -> WeightPosterior:
        """Return a posterior with initial medians and standard deviations, (P,) each.

        An instance is copied with its current parameters. Draws and moments of custom
        families are checked.
        """
        if isinstance(self.posterior, WeightPosterior):
            n_weights = self.posterior.n_weights
            if n_weights != len(location):
                raise ValueError(
                    f"posterior is an instance for {n_weights:,} weights, but "
                    f"{len(location):,} weights of the network require gradients. Pass "
                    "the class, or an instance for this network."
                )
            posterior = copy.deepcopy(self.posterior).to(location).requires_grad_(True)
            # an instance starts at its own medians, not at the network's weights
            location = posterior.median().detach()
        else:
            options = self.options or {}
            posterior = self.kind(location, scale, bound=self.bound, **options)
        # the package's own families need no check
        if self.kind not in POSTERIORS.values():
            fault = _fault(posterior, location, scale)
            if fault is not None:
                raise ValueError(f"posterior={self.kind.name!r} has {fault}. {_ADVICE}")
        return posterior


@torch.enable_grad()
def _fault(posterior: WeightPosterior, location: Tensor, scale: Tensor) -> str | None:
    """Return a description of a result that prevents training, or None.

    Shapes and dtypes are checked first, because the other checks compute with the
    results. Gradients are enabled, because draws must be differentiable.
    """

    def drawn(n_draws: int) -> tuple[Tensor, Tensor]:
        return posterior.sample(n_draws, torch.Generator().manual_seed(0))

    n = len(location)
    # the seed is the same, so both pairs of draws (2, P) must be equal
    (w, log_q), (repeated, _) = drawn(2), drawn(2)
    moments = {key: getattr(posterior, key)() for key in ("median", "mean", "variance")}
    for key, value in {"draws": w, "log densities": log_q, **moments}.items():
        expected = (n,) if key in moments else (2, n)
        shape = tuple(getattr(value, "shape", ()))
        dtype = getattr(value, "dtype", type(value))
        if (shape, dtype) != (expected, w.dtype):
            return f"{key} of shape {shape}, {dtype}, not {expected}, {w.dtype}"
    with torch.no_grad():
        error = float((posterior.log_prob(w) - log_q).abs().median())
        # at most `_DRAWN` values and 1000 draws; a variance needs at least two
        many_draws, _ = drawn(max(2, min(_DRAWN // n, 1000)))
        ratio = float((moments["variance"] / many_draws.var(0)).median())
        # in initial standard deviations, of which one is allowed
        distance = float(((moments["median"] - location).abs() / scale).max())
    # distributions with heavy tails have an infinite variance
    is_near = 1 / _LARGEST_RATIO <= ratio <= _LARGEST_RATIO or ratio == float("inf")
    # each fault, and whether the posterior is free of it
    checks = {
        "draws without gradients": w.requires_grad and log_q.requires_grad,
        "draws or log densities that are not finite": (w + log_q).isfinite().all(),
        "draws that do not follow the generator": torch.equal(w, repeated),
        f"a log_prob {error:.2g} nats away from sample's log_q": error <= _TOLERANCE,
        f"a variance {ratio:.2g} times as large as the draws' variance": is_near,
        "medians that do not start at location, the network's weights": distance <= 1,
    }
    return next((fault for fault, is_fine in checks.items() if not is_fine), None)

"""Posteriors with known parameters, and grid integrals over their densities.

The integrals use only ``log_prob``, no draws.
"""

import math
from typing import ClassVar

import torch
from cases import generator
from torch import nn
from torch.nn.functional import logsigmoid

from sklaplace.core.checks import check_positive
from sklaplace.variational import POSTERIORS, WeightPosterior

N_WEIGHTS = 4
LOCATION = torch.tensor([0.0, 0.4, -1.5, 2.0], dtype=torch.float64)
SCALE = torch.tensor([0.05, 0.3, 0.7, 0.1], dtype=torch.float64)
BOUND = 3.0


class Logistic(WeightPosterior):
    """A user-defined family with an option: ``w = location + scale · stretch · z``."""

    checks: ClassVar = {"stretch": check_positive}

    def __init__(self, location, scale, bound=3.0, stretch=1.0):
        super().__init__(location, scale, bound)
        self.stretch = stretch
        self.location = nn.Parameter(location.detach().clone())
        start = (scale * 3**0.5 / math.pi / stretch).log()
        self.log_scale = nn.Parameter(start.detach().to(location))

    @property
    def scale(self):
        return self.log_scale.exp() * self.stretch

    def noise(self, n, generator=None):
        x = super().noise(n, generator)
        return torch.special.log_ndtr(x) - torch.special.log_ndtr(-x)

    def transform(self, noise):
        log_q = logsigmoid(noise) + logsigmoid(-noise) - self.scale.log()
        return self.location + self.scale * noise, log_q

    def log_prob(self, w):
        return self.transform((w - self.location) / self.scale)[1]

    def median(self):
        return self.location

    def mean(self):
        return self.location

    def variance(self):
        return (math.pi * self.scale) ** 2 / 3


# names of the families that contracts run over, and sizes of deeper networks
KINDS = POSTERIORS | {Logistic.name: Logistic}
DEEP = {
    "density": {"n_units": 3, "n_layers": 3, "n_nodes": 12},
    "quantile": {"n_units": 2, "n_layers": 3},
}
# a fresh start, parameters drawn at random, and these of deeper networks
SETTINGS = [None, 0, 1]
CASES = [(name, setting) for name in KINDS for setting in SETTINGS]
CASES += [(name, "deep") for name in DEEP]


def posterior(name, setting=None, dtype=torch.float64):
    """Return an initial posterior, or perturb it so that all parameters matter."""
    is_deep = setting == "deep"
    start = LOCATION.to(dtype), SCALE.to(dtype), BOUND
    found = KINDS[name](*start, **DEEP[name] if is_deep else {})
    if setting is None:
        return found
    source = generator(0 if is_deep else setting)
    with torch.no_grad():
        if name == "kumaraswamy":
            u = torch.rand(2, N_WEIGHTS, generator=source, dtype=torch.float64)
            # from 0.6, where floats near the bounds still hold all but 1e-9 of the mass
            a, b = (0.6 * 40**u).to(dtype)
            set_kumaraswamy(found, a, b)
        else:
            for parameter in found.parameters():
                noise = torch.randn(parameter.shape, generator=source, dtype=dtype)
                parameter.add_(noise)
    return found


def set_kumaraswamy(found, a, b):
    """Set the parameters ``a`` and ``b`` of a posterior."""
    decay = math.log(2) / b.double()
    # both forms of log(1 − e^{−decay}), each precise where the other is not
    log_root = torch.where(
        decay < 1, (-torch.expm1(-decay)).log(), torch.log1p(-(-decay).exp())
    )
    log_m = log_root / a.double()
    with torch.no_grad():
        found.log_a.copy_(a.log())
        found.logit_median.copy_(log_m - (-torch.expm1(log_m)).log())


def grid(found, n=20_000):
    """Return points (G, P) and their weights (G, P), which depend on the parameters."""
    middles = (torch.arange(n, dtype=torch.float64) + 0.5).unsqueeze(-1) / n
    if found.name == "kumaraswamy":
        # where x = 1e-16, the density of a, b = 0.6 has 1e-9 of its mass beyond
        y = (2 * middles - 1) * 36.0
        x = torch.sigmoid(y)
        w = found.bound * (2 * x - 1)
        weight = 2 * found.bound * x * torch.sigmoid(-y) * 72 / n
        return w.expand(n, N_WEIGHTS), weight
    if found.name == "density":
        edge = 4 * torch.nn.functional.softplus(found.raw_scale)
        return found.location + (2 * middles - 1) * edge, 2 * edge / n
    # the density beyond is below exp(-70)
    reach = 13 * found.variance().sqrt().detach()
    return found.mean().detach() + (2 * middles - 1) * reach, 2 * reach / n


def expectation(found, function, n=20_000):
    """Return the differentiable ``E[f(w)]`` (P,) for f from (G, P) to (G, P)."""
    w, weight = grid(found, n)
    return (found.log_prob(w).exp() * function(w) * weight).sum(0)


def distribution(found, n=20_000):
    """Return points (G, P) and the mass below each point, (G, P)."""
    with torch.no_grad():
        w, weight = grid(found, n)
        mass = found.log_prob(w).exp() * weight
        return w, mass.cumsum(0) - mass / 2


def check_finite(found):
    """Check that draws, their densities and all gradients are finite."""
    w, log_q = found.sample(1000, generator())
    assert w.isfinite().all()
    assert log_q.isfinite().all()
    assert not found.log_prob(w.detach()).isnan().any()
    (w.sum() / 1e3 + log_q.sum()).backward()
    assert all(p.grad.isfinite().all() for p in found.parameters())

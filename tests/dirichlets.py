"""Public functions of Dirichlet distributions, and Dirichlets of Gaussian logits."""

import functools
import itertools

import numpy as np

from sklaplace import dirichlet
from sklaplace.dirichlet.bridge import NORMS

ALPHAS = np.random.default_rng(0).gamma(1.0, 3.0, size=(2, 5, 4)) + 0.01
# of concentrations
FUNCTIONS = {
    "entropy": dirichlet.entropy,
    "expected_entropy": dirichlet.expected_entropy,
    "interval": dirichlet.interval,
    "log_density": lambda a: dirichlet.log_density(a, dirichlet.mean(a)),
    "mean": dirichlet.mean,
    "plausible_classes": dirichlet.plausible_classes,
    "sample": dirichlet.sample,
    "uncertainty": dirichlet.uncertainty,
    "variance": dirichlet.variance,
}
# of means and covariances of logits
BRIDGES = {
    f"project={project}, norm={norm}": functools.partial(
        dirichlet.laplace_bridge, project=project, norm=norm
    )
    for project, norm in itertools.product((False, True), (None, *NORMS))
}
APPROXIMATIONS = {**BRIDGES, "projection": dirichlet.kl_projection}

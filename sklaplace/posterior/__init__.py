"""Posteriors over the selected weights of a network.

`GaussianPosterior` is the Laplace approximation. ``predictive`` computes the predictive
distribution of the outputs. ``linear_model`` refits the posterior mean for the last
layer or a linearised network. ``tuning`` selects hyperparameters by the marginal
likelihood or on held-out samples.
"""

from sklaplace.posterior.gaussian import GaussianPosterior

__all__ = ["GaussianPosterior"]

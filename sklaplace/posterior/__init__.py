"""Posteriors over the selected weights of a network.

`GaussianPosterior` is the Laplace approximation. ``predictive`` computes the predictive
distribution of the outputs. ``linear_model`` refits the posterior mean for the last
layer or a linearised network. ``tuning`` chooses hyperparameters by the evidence or on
held-out data. ``variational`` contains the posteriors of Bayes by Backprop.
"""

from sklaplace.posterior.gaussian import GaussianPosterior

__all__ = ["GaussianPosterior"]

"""Posteriors over the selected weights of a network and what follows from them.

`GaussianPosterior` is the Laplace approximation; ``predictive`` maps it to the outputs,
and ``linear_model`` refits its mean, for the last layer or a linearised network.
``tuning`` chooses its hyperparameters by the evidence or on held-out data.
``variational`` holds the posteriors of Bayes by Backprop.
"""

from sklaplace.posterior.gaussian import GaussianPosterior

__all__ = ["GaussianPosterior"]

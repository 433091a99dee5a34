"""Likelihoods: distributions of targets given the outputs of a network.

`CRITERIA` maps each criterion of a skorch net to its likelihood. Custom likelihoods
derive from `DensityLikelihood`, or, to use closed forms, from `RegressionLikelihood` or
`ClassificationLikelihood`. `output_hessian` implements closed forms of the Hessian of
the loss with respect to the outputs.
"""

from torch import nn

from sklaplace.likelihoods.base import Likelihood, SeparableLikelihood
from sklaplace.likelihoods.classification import (
    Bernoulli,
    Categorical,
    CategoricalMap,
    ClassificationLikelihood,
    MultilabelBernoulli,
)
from sklaplace.likelihoods.density import DensityLikelihood
from sklaplace.likelihoods.regression import (
    Gaussian,
    HeteroscedasticGaussian,
    HeteroscedasticNLLLoss,
    Poisson,
    RegressionLikelihood,
)

CRITERIA: dict[type[nn.Module], tuple[Likelihood, str]] = {
    nn.CrossEntropyLoss: (Categorical(), "logits"),
    nn.NLLLoss: (Categorical(), "probabilities"),
    nn.BCEWithLogitsLoss: (Bernoulli(), "logits"),
    nn.BCELoss: (Bernoulli(), "probabilities"),
    nn.MSELoss: (Gaussian(), "mean"),
    nn.PoissonNLLLoss: (Poisson(), "mean"),
    HeteroscedasticNLLLoss: (HeteroscedasticGaussian(), "mean"),
}
"""Likelihood of each criterion, and the quantity that the module returns."""

__all__ = [
    "CRITERIA",
    "Bernoulli",
    "Categorical",
    "CategoricalMap",
    "ClassificationLikelihood",
    "DensityLikelihood",
    "Gaussian",
    "HeteroscedasticGaussian",
    "HeteroscedasticNLLLoss",
    "Likelihood",
    "MultilabelBernoulli",
    "Poisson",
    "RegressionLikelihood",
    "SeparableLikelihood",
]

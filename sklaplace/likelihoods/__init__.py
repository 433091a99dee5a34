"""Likelihoods: how outputs of the network and targets make a loss. The registry."""

from torch import nn

from sklaplace.likelihoods.base import (
    ClassLikelihood,
    DataFit,
    Likelihood,
    NumberLikelihood,
    output_weights,
    weighted,
)
from sklaplace.likelihoods.classification import (
    Bernoulli,
    Categorical,
    CategoricalMap,
    Labels,
    MultilabelBernoulli,
)
from sklaplace.likelihoods.regression import (
    Gaussian,
    HeteroscedasticGaussian,
    HeteroscedasticNLLLoss,
    Numbers,
    Poisson,
)

# criterion of the skorch net -> (likelihood, what the module puts out)
CRITERIA: dict[type[nn.Module], tuple[Likelihood, str]] = {
    nn.CrossEntropyLoss: (Categorical(), "logits"),
    nn.NLLLoss: (Categorical(), "probabilities"),
    nn.BCEWithLogitsLoss: (Bernoulli(), "logits"),
    nn.BCELoss: (Bernoulli(), "probabilities"),
    nn.MSELoss: (Gaussian(), "mean"),
    nn.PoissonNLLLoss: (Poisson(), "mean"),
    HeteroscedasticNLLLoss: (HeteroscedasticGaussian(), "mean"),
}

__all__ = [
    "CRITERIA",
    "Bernoulli",
    "Categorical",
    "CategoricalMap",
    "ClassLikelihood",
    "DataFit",
    "Gaussian",
    "HeteroscedasticGaussian",
    "HeteroscedasticNLLLoss",
    "Labels",
    "Likelihood",
    "MultilabelBernoulli",
    "NumberLikelihood",
    "Numbers",
    "Poisson",
    "output_weights",
    "weighted",
]

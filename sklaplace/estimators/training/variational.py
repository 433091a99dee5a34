"""VariationalTrainer: training of distributions over the weights of a network."""

import copy
from dataclasses import dataclass
from typing import Any

from sklearn.base import clone
from skorch import NeuralNet
from skorch.callbacks import ParamMapper

from sklaplace.data.dataset import TrainingData
from sklaplace.estimators.options.given_net import inner_net
from sklaplace.estimators.predicting.output_model import require_draws
from sklaplace.estimators.training.prior_callback import (
    PriorCallback,
    check_optimizer,
    refuse_callbacks,
)
from sklaplace.estimators.training.trainer import Trainer
from sklaplace.networks.default import PenalisedNet, without_penalty
from sklaplace.networks.outputs import OutputSpec
from sklaplace.variational.elbo import Elbo
from sklaplace.variational.module import VariationalPosterior


@dataclass(kw_only=True)
class VariationalTrainer(Trainer):
    """Trainer of distributions over the weights, with Bayes by Backprop.

    Attributes
    ----------
    elbo : Elbo
        Objective, the evidence lower bound.
    n_samples : int
        Number of draws of the weights for predictions.
    """

    elbo: Elbo
    n_samples: int

    has_prior = True
    keeps_weights = False

    def new_net(self, data: TrainingData) -> NeuralNet:
        """Return the net to train, without a penalty on its weights.

        The prior takes the place of the penalty.
        """
        net = inner_net(self.estimator)
        net = super().new_net(data) if net is None else clone(net)
        return without_penalty(net) if isinstance(net, PenalisedNet) else net

    def learn(self, net: NeuralNet, data: TrainingData) -> tuple[Any, Any]:
        """Train the distributions, and return training and held-out samples.

        The training starts at the weights of a frozen net if given. It sets the
        attributes ``posterior`` and ``noise``. Afterwards, the net is an ordinary one,
        whose weights are the medians of the distributions.
        """
        _check_net(net, has_likelihood=self.likelihood is not None)
        if self.is_frozen:  # the mixin reads these weights when it builds the module
            self.elbo.start = copy.deepcopy(inner_net(self.estimator).module_)
        samples = super().learn(net, data)
        module = net.module_
        distribution = module.posterior.requires_grad_(False)
        if not all(bool(p.isfinite().all()) for p in distribution.parameters()):
            raise ValueError(
                "The training of the posterior has diverged: its parameters are not "
                "finite. Lower the learning rate of estimator, or scale X."
            )
        self.posterior = VariationalPosterior(
            distribution, self.elbo.prior, module.layout
        )
        distribution.zero_grad()  # so that the posterior stores no gradients
        self.noise = self.elbo.noise(module).cpu()
        # an ordinary module replaces that of the distributions
        net.module_ = module.at_medians()
        net.initialize_optimizer()  # for the new weights of the net
        return samples

    def training_mixins(self) -> tuple[type, ...]:
        """Return the mixin that computes the objective."""
        return (self.elbo.mixin(),)

    def before_training(self, net: NeuralNet, spec: OutputSpec, held_out: Any) -> None:
        """Check the optimizer and the memory for draws, and set up the objective."""
        check_optimizer(net)
        require_draws(self.n_samples, net.module_.layout.n_parameters)
        if self.validation_fraction is not None:
            self.elbo.held_out = held_out
        self.elbo.set_output_spec(net.module_, spec)


def _check_net(net: NeuralNet, *, has_likelihood: bool) -> None:
    """Raise ValueError for settings of a net that Bayes by Backprop would ignore."""
    net_class = type(net)
    # class that defines the net's loss, which the evidence lower bound replaces
    owner = next(base for base in net_class.__mro__ if "get_loss" in vars(base))
    if not (has_likelihood or owner.__module__.startswith("skorch.")):
        raise ValueError(
            f"estimator is a {net_class.__name__}, whose get_loss would not be used. "
            "Use a net with skorch's get_loss, or pass likelihood."
        )
    if getattr(net, "optimizer__param_groups", None):
        raise ValueError(
            "optimizer__param_groups names parameters that are not trained. Leave it "
            "out."
        )
    if net.max_epochs == 0:
        raise ValueError(
            "The net has max_epochs=0, which learns no distribution. Use 1 or more; "
            "distributions train more slowly than weights."
        )
    refuse_callbacks(net, PriorCallback, ParamMapper)

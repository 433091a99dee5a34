"""Evidence lower bound as the objective of skorch's training loop.

    loss = mean of nll over the batch + factor · kl_weight · KL(q ‖ prior) / N

The loss of a batch is in nats and uses one draw of the weights. N is the number of
training samples after skorch's split, or the sum of their weights. The KL schedule
determines ``factor``, whose mean over an epoch is one. In regression, the observation
noise is estimated from held-out samples at the medians of the weights. Without held-out
samples, the noise variance is the running mean of squared residuals, which maximises
the bound.
"""

import copy
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Self

import torch
from skorch import NeuralNet
from skorch.history import History
from skorch.utils import to_tensor
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sklaplace.data.dataset import Batches
from sklaplace.data.streams import Samples
from sklaplace.likelihoods.base import Likelihood, loss_weights, losses_by_output
from sklaplace.networks.forward import OUTPUT_MAPS, Forward, as_columns
from sklaplace.networks.outputs import OutputSpec, unwrapped
from sklaplace.networks.training import batch_weights, mean_weight
from sklaplace.variational.divergence import divergence
from sklaplace.variational.family import PosteriorFamily
from sklaplace.variational.module import (
    StochasticModule,
    initial_scales,
    random_weights,
)
from sklaplace.variational.priors import WeightPrior

# Minimum number of steps in the running mean of squared residuals. A mean over fewer
# steps would follow the sampling noise of single draws.
NOISE_STEPS = 20
# Minimum number of steps between two estimates of the noise from held-out samples.
HELD_OUT_STEPS = 10
# Lower limit of held-out estimates, as a fraction of the batch's mean squared residual.
LEAST_VARIANCE = 0.1


def uniform(batch: int, n_batches: int) -> float:
    """Return one, so that all batches have equal shares of the divergence."""
    return 1.0


def blundell(batch: int, n_batches: int) -> float:
    """Halve the share of the divergence from each batch to the next, starting at 1/2.

    The factor is ``M 2^(M-i) / (2^M - 1)`` for batch i of M, counted from one (Blundell
    et al. 2015, section 3.4). The argument ``batch`` is ``i - 1``. The computation
    avoids powers that overflow.
    """
    return float(n_batches * 2.0**-batch / (2 - 2.0 ** (1 - n_batches)))


# (batch from zero, batches per epoch) -> factor of the divergence, with mean one
KL_SCHEDULES = {"uniform": uniform, "blundell": blundell}


@dataclass
class Elbo:
    """Objective of Bayes by Backprop, with its state during training.

    Attributes
    ----------
    family : PosteriorFamily
        Recipe for the posterior.
    prior : WeightPrior
        Prior of each weight.
    kl_weight : float
        Factor of the divergence.
    schedule : str
        Key of ``KL_SCHEDULES``.
    sigma : float or None
        Standard deviation of the observation noise. If None, it is estimated.
    start : nn.Module or None
        Trained network whose weights are the initial medians. If None, the skorch net
        initialises the weights.
    held_out : Dataset or None
        Held-out samples to estimate the noise. If None, training batches are used.
    """

    family: PosteriorFamily
    prior: WeightPrior
    kl_weight: float
    schedule: str
    sigma: float | None = None
    start: nn.Module | None = None
    held_out: Samples | None = None
    spec: OutputSpec = field(init=False, repr=False)
    n_samples: int = 0
    n_batches: int = 1
    _n_updates: int = 0
    # (nll, divergence, batch size) for each batch of the epoch. A batch that an
    # optimiser evaluates several times counts as several batches.
    _terms: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)
    # sum of the weights of all training samples
    _total_weight: float = 0.0

    def mixin(self) -> type:
        """Return the mixin class that trains a net with this objective."""
        return type("_ElboTraining", (_ElboTraining,), {"_elbo": self})

    def wrapped(self, module: nn.Module) -> StochasticModule:
        """Wrap a module, or `start` if given, in a module with drawn weights.

        The weights of the network are the initial medians, unless the family is an
        instance, which has its own.
        """
        # a copy of `start`, so that training does not change the user's network
        base = unwrapped(module if self.start is None else copy.deepcopy(self.start))
        layout, parameters = random_weights(base), dict(base.named_parameters())
        # the tensors in the order of the vector of weights
        values = [parameters[block.name].detach() for block in layout.blocks]
        # one vector has one dtype, that of the first tensor
        location = torch.cat([w.reshape(-1).to(values[0].dtype) for w in values])
        scale = initial_scales(values).to(location)
        return StochasticModule(base, layout, self.family.start(location, scale))

    def set_output_spec(self, module: StochasticModule, spec: OutputSpec) -> None:
        """Define how outputs are interpreted; called once, before the first step.

        ``spec`` has the likelihood. If the network returns probabilities, ``spec`` also
        has the name of the submodule whose outputs are the logits.
        """
        module.logit_layer, self.spec = spec.logit_layer, spec
        if not spec.likelihood.is_shift_invariant:
            # the logarithm of a probability is a logit only up to a common shift
            module.probability_map = "logit"

    def noise(self, module: StochasticModule) -> Tensor:
        """Return the standard deviation of the observation noise, float64.

        The shape is () for given noise, and otherwise that of the columns of
        `losses_by_output`.
        """
        if self.sigma is not None:
            return torch.tensor(float(self.sigma), dtype=torch.float64)
        # positive, so that the logarithm and the quotients in `sample_nll` are finite
        return module.noise_variance.clamp(min=torch.finfo(torch.float32).tiny).sqrt()

    def loss(
        self, net: NeuralNet, returned: object, y: Tensor, *, training: bool
    ) -> Tensor:
        """Return the loss of a batch in nats per sample.

        In training, the loss is the negative evidence lower bound. The method then also
        updates an estimated noise variance, and records the terms for `summary`. In
        evaluation, the loss is only the mean negative log-likelihood. ``returned`` is
        what the network returned for the batch.
        """
        likelihood, module = self.spec.likelihood, net.module_
        # the likelihood's parameters, such as logits or means, (b, c); the output map
        # computes them if the network returns others, such as probabilities
        f = OUTPUT_MAPS[self.spec.output_map](as_columns(module.outputs(returned)))
        targets = likelihood.targets(y, f)
        losses = losses_by_output(likelihood, f, targets)
        # sample weights times the criterion's factors, such as class weights, (b,)
        weights = loss_weights(likelihood, targets, batch_weights(net))
        weights = losses.new_ones(len(f)) if weights is None else weights.to(losses)
        # so that the mean sample weight of the data is one
        weights = weights / mean_weight(net)
        n_targets = likelihood.n_targets(f.shape[1])
        if training and likelihood.has_noise and self.sigma is None:
            mean_losses = weights @ losses.detach() / weights.sum()  # (c,)
            # the loss of a column is half the sum of n_targets / c squared residuals
            self._update_noise(net, 2 * mean_losses * len(mean_losses) / n_targets)
        nlls = sample_nll(likelihood, losses, self.noise(module), n_targets)
        nll = (weights * nlls).mean()
        if not training:
            return nll
        # `drawn` has the weights of this pass and their log densities
        kl = divergence(module.posterior, self.prior, *module.drawn)
        self._terms.append((nll.detach(), kl.detach(), len(losses)))
        # the terms are those of this epoch, so their number is that of its batches
        factor = KL_SCHEDULES[self.schedule](len(self._terms) - 1, self.n_batches)
        self._total_weight = self.n_samples * mean_weight(net)
        return nll + (factor * self.kl_weight / self._total_weight) * kl

    def _update_noise(self, net: NeuralNet, mean_squares: Tensor) -> None:
        """Update the noise variances, given mean squared residuals of a batch, (c,).

        The estimate is the buffer ``noise_variance`` of the module. Without held-out
        samples, it is the running mean of the residuals. Otherwise, it is measured on
        the held-out samples about once per epoch.

        Estimates from held-out samples have a lower limit. If the targets are constant,
        the variance is near zero before the first step. Without the limit, the first
        gradients would be huge, and Adam's second moments would retain them.
        """
        mean_squares = mean_squares.double()
        self._n_updates += 1
        estimate = net.module_.noise_variance  # updated in place
        # the number of columns is known only from the first batch
        if estimate.shape != mean_squares.shape:
            net.module_.noise_variance = estimate = torch.zeros_like(mean_squares)
        if self.held_out is None:
            # at first the mean of all steps, and later an exponential mean over at
            # least one epoch
            n_averaged = min(self._n_updates, max(NOISE_STEPS, self.n_batches))
            estimate.lerp_(mean_squares, 1 / n_averaged)
        # a pass over held-out samples is costly, so most steps keep the estimate
        elif (self._n_updates - 1) % max(HELD_OUT_STEPS, self.n_batches) == 0:
            least = LEAST_VARIANCE * mean_squares
            estimate.copy_(torch.maximum(self._held_out_variance(net), least))

    @torch.no_grad()
    def _held_out_variance(self, net: NeuralNet) -> Tensor:
        """Return held-out mean squared residuals (c,) at the medians of the weights."""
        assert self.held_out is not None
        likelihood, module = self.spec.likelihood, net.module_
        loss_sums, n_targets = torch.zeros_like(module.noise_variance), 0.0
        # `frozen` enters evaluation mode, in which the weights are the medians.
        # Gradients are enabled for networks that use gradients internally.
        with Forward(module, module).frozen(), torch.enable_grad():
            for x, y, w in Batches(net, self.held_out, self.spec.batch_size()):
                f = as_columns(module.outputs(net.infer(x))).detach().double()
                losses = losses_by_output(likelihood, f, likelihood.targets(y, f))
                weights = torch.ones_like(losses[:, 0]) if w is None else w.to(losses)
                loss_sums += weights @ losses
                n_targets += float(weights.sum()) * likelihood.n_targets(f.shape[1])
        # A loss is half a sum of squared residuals. ``n_targets`` is the weighted
        # number of targets of all c columns, and each column has 1/c of them.
        return 2 * loss_sums * len(loss_sums) / n_targets

    def summary(self) -> dict[str, float]:
        """Return the past epoch's means of the terms, in nats, and forget the terms.

        The keys are ``kl`` for the divergence, and ``elbo`` for the evidence lower
        bound. If there was no batch, the result is empty.
        """
        if not self._terms:
            return {}
        nlls, kls, batch_sizes = zip(*self._terms, strict=True)
        self._terms = []
        n = torch.tensor(batch_sizes, dtype=torch.float64)
        mean_nll = float(torch.stack(nlls).double().cpu() @ n / n.sum())
        # the divergence does not depend on samples, so all batches count equally
        mean_kl = float(torch.stack(kls).double().mean())
        return {"kl": mean_kl, "elbo": -mean_nll * self._total_weight - mean_kl}


def sample_nll(likelihood: Likelihood, losses: Tensor, sigma: Tensor, n: int) -> Tensor:
    """Return the negative log-likelihood of each sample in nats, (b, ...).

    ``losses`` (b, c, ...) is the result of `losses_by_output`, ``sigma`` has one noise
    level or one per column, and n is the number of targets of a sample. For Gaussian
    noise, the result is ``loss / σ²`` plus ``log σ + log √(2π)`` for each target.
    """
    sigma = sigma.to(losses)  # () or (c,)
    # one factor per column, to broadcast against (b, c, ...)
    scale = likelihood.scale(sigma).reshape(-1, *[1] * (losses.ndim - 2))
    # all columns have the same number of targets, so the mean over columns suffices
    return (scale * losses).sum(1) + n * likelihood.log_normalizer(sigma).mean()


class _ElboTraining:
    """Mixin that trains a skorch net with an `Elbo`."""

    _elbo: Elbo
    device: str | torch.device | None
    history: History
    module_: StochasticModule

    def initialize_module(self) -> Self:
        """Initialise the module, and give its weights a posterior."""
        super().initialize_module()  # type: ignore[misc]
        self.module_ = self._elbo.wrapped(self.module_)
        return self

    def get_iterator(
        self, dataset: Sized, training: bool = False
    ) -> DataLoader[object]:
        """Return batches; in training, store their number and that of samples.

        The loss of a batch depends on both numbers.
        """
        loader = super().get_iterator(dataset, training=training)  # type: ignore[misc]
        if training:
            self._elbo.n_samples, self._elbo.n_batches = len(dataset), len(loader)
        return loader

    def on_epoch_end(self, net: NeuralNet, **kwargs: object) -> None:
        """Record the terms of the objective in the history."""
        super().on_epoch_end(net, **kwargs)  # type: ignore[misc]
        for name, value in self._elbo.summary().items():
            self.history.record(name, value)

    def get_loss(
        self, y_pred: object, y_true: object, X: object = None, training: bool = False
    ) -> Tensor:
        """Return the loss of a batch in nats per sample.

        In training, the loss is the negative evidence lower bound. In evaluation, it is
        the negative log-likelihood.
        """
        y = to_tensor(y_true, device=self.device)
        # a user's training step may omit ``training``; the module's mode is reliable
        return self._elbo.loss(self, y_pred, y, training=self.module_.training)

"""Elbo: the objective of Bayes by Backprop, within skorch's own training loop.

    loss = mean of nll over the batch + factor · kl_weight · KL(q ‖ prior) / N

per batch, in nats, with one draw of the weights for each of them; N counts training
rows after whatever skorch holds out, or their weights. ``factor`` is the schedule's,
with mean one over an epoch. The noise of numbers is that of held-out rows, where there
are some, at the medians of the weights; else the one that maximises the objective,
followed by a running mean of squared residuals.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from skorch.utils import to_tensor
from torch import Tensor, nn

from sklaplace.likelihoods import Likelihood, weighted
from sklaplace.networks.data import Batches
from sklaplace.networks.forward import OUTPUT_MAPS, as_columns
from sklaplace.networks.outputs import OutputSpec, unwrapped
from sklaplace.networks.training import batch_weights, mean_weight
from sklaplace.posterior.variational import POSTERIORS
from sklaplace.posterior.variational.divergence import divergence
from sklaplace.posterior.variational.module import (
    StochasticModule,
    random_weights,
    start_scales,
)
from sklaplace.posterior.variational.priors import WeightPrior

# Steps that the running mean of squared residuals reaches back, at least: fewer would
# follow the noise of single draws.
NOISE_STEPS = 20
# Steps from one look at held-out rows to the next, at least.
LOOK_EVERY = 10
# Share of the draws' mean squared residual that the noise found there keeps, at least.
LEAST_SQUARE = 0.1


def uniform(batch: int, n_batches: int) -> float:
    """The same for all batches."""
    return 1.0


def blundell(batch: int, n_batches: int) -> float:
    """Half the divergence in the first batch, a quarter in the second, and so on.

    ``M 2^(M-i) / (2^M - 1)`` for batch i of M, counted from one (Blundell et al. 2015,
    section 3.4), without powers that overflow.
    """
    return float(n_batches * 2.0**-batch / (2 - 2.0 ** (1 - n_batches)))


# (batch from zero, batches in an epoch) -> factor of the divergence, of mean one
KL_SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "uniform": uniform,
    "blundell": blundell,
}


@dataclass
class _Sums:
    """What an epoch adds up to."""

    nll: Tensor | float = 0.0
    divergence: Tensor | float = 0.0
    n_rows: int = 0
    n_batches: int = 0

    def add(self, nll: Tensor, divergence: Tensor, n_rows: int) -> None:
        """Add a batch."""
        self.nll = self.nll + nll.double() * n_rows
        self.divergence = self.divergence + divergence.double()
        self.n_rows += n_rows
        self.n_batches += 1


@dataclass
class Elbo:
    """What is learned, and how far the learning has come.

    Attributes
    ----------
    posterior : str
        Key of ``POSTERIORS``.
    prior : WeightPrior
        Of each weight.
    bound : float
        Largest magnitude of weights under bounded posteriors.
    kl_weight : float
        Factor of the divergence.
    schedule : str
        Key of ``KL_SCHEDULES``.
    sigma : float or None
        Standard deviation of the noise; None: found in training.
    start : nn.Module or None
        A trained network to start from; None: the net's own initialisation.
    held_out : Dataset or None
        Rows that the noise is taken from; None: those of the batch.
    """

    posterior: str
    prior: WeightPrior
    bound: float
    kl_weight: float
    schedule: str
    sigma: float | None = None
    start: nn.Module | None = None
    held_out: Any = None
    reading: OutputSpec | None = None
    n_rows: int = 0
    n_batches: int = 1
    batch: int = -1
    _n_squares: int = 0
    _sums: _Sums = field(default_factory=_Sums)
    _total: float = 0.0

    def mixin(self) -> type:
        """What comes before a net's own class for the time of training."""
        return type("_ElboTraining", (_ElboTraining,), {"_elbo": self})

    def wrapped(self, module: nn.Module) -> StochasticModule:
        """A network under drawn weights, starting at its own ones, or those given."""
        base = copy.deepcopy(self.start) if self.start is not None else module
        base = unwrapped(base)
        layout = random_weights(base)
        own = dict(base.named_parameters())
        values = [own[block.name].detach() for block in layout.blocks]
        dtype = values[0].dtype
        location = torch.cat([value.reshape(-1).to(dtype) for value in values])
        scale = start_scales(values).to(location)
        kind = POSTERIORS[self.posterior]
        return StochasticModule(base, layout, kind(location, scale, self.bound))

    def begin(self, module: StochasticModule, reading: OutputSpec) -> None:
        """Before the first step: how the outputs are read."""
        module.logit_layer, self.reading = reading.logit_layer, reading

    def noise(self, module: StochasticModule) -> Tensor:
        """Standard deviation of the noise in use, (), float64."""
        if self.sigma is not None:
            return torch.tensor(float(self.sigma), dtype=torch.float64)
        return module.square.clamp(min=torch.finfo(torch.float32).tiny).sqrt()

    # -------------------------------------------------------------------- the loss
    def loss(self, net: Any, returned: Any, y: Tensor, *, training: bool) -> Tensor:
        """Objective of a batch, in nats per row; without the divergence outside."""
        assert self.reading is not None
        likelihood, module = self.reading.likelihood, net.module_
        f = OUTPUT_MAPS[self.reading.output_map](as_columns(module.outputs(returned)))
        targets = likelihood.targets(y, f)
        losses = likelihood.loss(f, targets)
        weights = weighted(likelihood, targets, batch_weights(net))
        if weights is None:
            weights = torch.ones_like(losses)
        weights = weights.to(losses) / mean_weight(net)
        n_targets = likelihood.n_targets(f.shape[1])
        if training and likelihood.has_noise and self.sigma is None:
            mean = (weights * losses.detach()).sum() / weights.sum()
            self._move_noise(net, 2 * mean / n_targets)
        sigma = self.noise(module)
        nll = (weights * nats(likelihood, losses, sigma, n_targets)).mean()
        if not training:
            return nll
        assert module.drawn is not None
        kl = divergence(module.posterior, self.prior, *module.drawn)
        self._sums.add(nll.detach(), kl.detach(), len(losses))
        factor = KL_SCHEDULES[self.schedule](self.batch, self.n_batches)
        self._total = n = self.n_rows * mean_weight(net)
        return nll + (factor * self.kl_weight / n) * kl

    def _move_noise(self, net: Any, square: Tensor) -> None:
        """Take the noise from a batch's mean squared residual, (), or other rows."""
        if self.held_out is None:
            self._follow(net.module_, square)
        else:
            self._look(net, square)

    def _follow(self, module: StochasticModule, square: Tensor) -> None:
        """Move the noise to the mean squared residual of a batch, ()."""
        self._n_squares += 1
        share = 1 / min(self._n_squares, max(NOISE_STEPS, self.n_batches))
        module.square.lerp_(square.double(), share)

    def _look(self, net: Any, square: Tensor) -> None:
        """Take the noise from rows that are not trained on, now and then.

        It is no less than a share of what the draws miss a batch by: next to none, as
        where constant targets are met before the first step, would make gradients that
        Adam never forgets.
        """
        every = max(LOOK_EVERY, self.n_batches)
        if self._n_squares % every == 0:
            least = LEAST_SQUARE * float(square)
            net.module_.square.fill_(max(self._held_out_square(net), least))
        self._n_squares += 1

    @torch.no_grad()
    def _held_out_square(self, net: Any) -> float:
        """Mean squared residual of held-out rows at the medians."""
        assert self.reading is not None
        likelihood, module = self.reading.likelihood, net.module_
        total, count = 0.0, 0.0
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        try:
            for x, y, w in Batches(net, self.held_out, self.reading.batch_size()):
                f = as_columns(module.outputs(net.infer(x))).double()
                losses = likelihood.loss(f, likelihood.targets(y, f))
                weights = torch.ones_like(losses) if w is None else w.to(losses)
                total += float(weights @ losses)
                count += float(weights.sum()) * likelihood.n_targets(f.shape[1])
        finally:
            for part, mode in modes:
                part.training = mode
        return 2 * total / count

    def summary(self) -> dict[str, float]:
        """Divergence and evidence lower bound, in nats, as an epoch saw them."""
        sums, self._sums = self._sums, _Sums()
        if not sums.n_rows:
            return {}
        kl = float(sums.divergence / sums.n_batches)
        return {
            "kl": kl,
            "elbo": -float(sums.nll / sums.n_rows) * self._total - kl,
        }


def nats(
    likelihood: Likelihood, losses: Tensor, sigma: Tensor, n_targets: int
) -> Tensor:
    """Negative log-likelihoods of rows from losses (b, ...), in their shape."""
    sigma = sigma.to(losses)
    normalizer = n_targets * likelihood.log_normalizer(sigma)
    return likelihood.scale(sigma) * losses + normalizer


class _ElboTraining:
    """Mixin before a skorch net that is trained by an `Elbo`."""

    _elbo: Elbo
    device: Any
    history: Any
    module_: Any

    def initialize_module(self) -> Any:
        super().initialize_module()  # type: ignore[misc]
        self.module_ = self._elbo.wrapped(self.module_)
        return self

    def get_iterator(self, dataset: Any, training: bool = False) -> Any:
        loader = super().get_iterator(dataset, training=training)  # type: ignore[misc]
        if training:
            self._elbo.n_rows, self._elbo.n_batches = len(dataset), len(loader)
        return loader

    def on_epoch_begin(self, net: Any, **kwargs: Any) -> None:
        super().on_epoch_begin(net, **kwargs)  # type: ignore[misc]
        self._elbo.batch = -1

    def on_batch_begin(
        self, net: Any, batch: Any = None, training: bool = False, **kwargs: Any
    ) -> None:
        super().on_batch_begin(  # type: ignore[misc]
            net, batch=batch, training=training, **kwargs
        )
        self._elbo.batch += training

    def on_epoch_end(self, net: Any, **kwargs: Any) -> None:
        super().on_epoch_end(net, **kwargs)  # type: ignore[misc]
        for name, value in self._elbo.summary().items():
            self.history.record(name, value)

    def get_loss(
        self, y_pred: Any, y_true: Any, X: Any = None, training: bool = False
    ) -> Tensor:
        y = to_tensor(y_true, device=self.device)
        # a training step of one's own need not say that it is one; its weights do
        return self._elbo.loss(self, y_pred, y, training=self.module_.training)

"""BaseVariational: distributions of weights that are trained, and what they say.

Between the estimators and the objective: settings, the training of the net, and what is
known once it is over.
"""

import copy
import math
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from skorch.callbacks import ParamMapper
from torch import Tensor

from sklaplace.core.checks import Check, check_option, check_params, check_positive
from sklaplace.estimators.outputs import (
    Draws,
    TrainedNetwork,
    WeightPredictor,
    require_draws,
)
from sklaplace.estimators.prior_callback import PriorCallback
from sklaplace.estimators.sampling import SamplingEstimator
from sklaplace.likelihoods import weighted
from sklaplace.networks.data import TrainingData
from sklaplace.networks.default import is_penalised, without_penalty
from sklaplace.networks.forward import Forward
from sklaplace.networks.outputs import OutputSpec
from sklaplace.networks.training import copied
from sklaplace.posterior.predictive import network_draws
from sklaplace.posterior.variational import POSTERIORS
from sklaplace.posterior.variational.divergence import check_support
from sklaplace.posterior.variational.elbo import KL_SCHEDULES, Elbo, nats
from sklaplace.posterior.variational.module import (
    StochasticModule,
    VariationalPosterior,
)
from sklaplace.posterior.variational.priors import PRIORS, WeightPrior

# Draws of the weights that the evidence lower bound is averaged over: the average over
# rows leaves little noise.
ELBO_DRAWS = 20
# nats per row by which predictions must be worse to be worth a word
NOTABLE_RISE = 0.02


class BaseVariational(SamplingEstimator, WeightPredictor):
    """Shared by both estimators; not for direct use."""

    posterior: str
    prior: str
    prior_scale: float
    prior_params: dict[str, Any] | None
    kl_weight: float
    kl_schedule: str
    bound: float
    verbose: int
    posterior_: VariationalPosterior
    elbo_: float
    kl_: float
    _elbo: Elbo
    _noise_in_training: float

    # ------------------------------------------------------------------ settings
    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_option("posterior", self.posterior, POSTERIORS)
        check_option("kl_schedule", self.kl_schedule, KL_SCHEDULES)
        check_positive("kl_weight", self.kl_weight)
        check_positive("bound", self.bound)
        check_support(POSTERIORS[self.posterior], self._prior())

    def _prior(self) -> WeightPrior:
        """The prior asked for, with its options."""
        check_option("prior", self.prior, PRIORS)
        kind = PRIORS[self.prior]
        names = {field.name for field in fields(kind)}
        common: dict[str, Any] = {"scale": self.prior_scale, "bound": self.bound}
        options: dict[str, Check] = dict.fromkeys(names - set(common), _checked_later)
        given = self.prior_params
        check_params("prior_params", given, options, f"prior={self.prior!r}")
        check_positive("prior_scale", self.prior_scale)
        known = {k: v for k, v in common.items() if k in names}
        return kind(**known, **(given or {}))

    def _sigma(self) -> float | None:
        """Noise that is given; None: found in training."""
        return None

    # ------------------------------------------------------------------ training
    def _new_net(self, data: TrainingData) -> Any:
        net = self._default_net(data) if self.estimator is None else clone(self._net())
        return without_penalty(net) if is_penalised(net) else net

    def _learn(
        self,
        net: Any,
        data: TrainingData,
        validation: TrainingData | None,
        fit_params: dict[str, Any],
    ) -> tuple[Any, Any]:
        _check_net(net, has_likelihood=self.likelihood is not None)
        start = self._net().module_ if self._is_frozen() else None
        self._elbo = Elbo(
            posterior=self.posterior,
            prior=self._prior(),
            bound=float(self.bound),
            kl_weight=float(self.kl_weight),
            schedule=self.kl_schedule,
            sigma=self._sigma(),
            start=copy.deepcopy(start),
        )
        rows = self._train(net, data, validation, fit_params)
        self._settle(net)
        return rows

    def _changes(self) -> tuple[type, ...]:
        return (self._elbo.mixin(),)

    def _begin(self, net: Any, reading: OutputSpec, held_out: Any) -> None:
        _check_optimizer(net)
        require_draws(self.n_samples, net.module_.layout.n_parameters)
        if self._tunes_on_rows():
            self._elbo.held_out = held_out
        self._elbo.begin(net.module_, reading)

    def _settle(self, net: Any) -> None:
        """Take the posterior out of a trained net, which keeps the medians."""
        module: StochasticModule = net.module_
        distribution = module.posterior.requires_grad_(False)
        if not all(bool(p.isfinite().all()) for p in distribution.parameters()):
            raise ValueError(
                "The training of the posterior has diverged: its parameters are not "
                "finite. Lower the learning rate, or scale the inputs."
            )
        self.posterior_ = VariationalPosterior(
            distribution, self._elbo.prior, module.layout
        )
        distribution.zero_grad()
        self._noise_in_training = float(self._elbo.noise(module))
        net.module_ = module.settled()
        net.initialize_optimizer()  # of the weights that the net now has

    # ------------------------------------------------------------ what was learned
    def _publish(self, fitted: TrainedNetwork) -> None:
        super()._publish(fitted)
        n_draws = min(ELBO_DRAWS, max(2, self.n_samples))
        generator = torch.Generator().manual_seed(self._seed)
        weights = self.posterior_.sample(n_draws, generator)
        self.kl_ = float(self.posterior_.kl(n_draws, generator))
        draws = partial(network_draws, self.posterior_, weights=weights)
        # the objective's: beside the spread of draws, sigma_noise_ may be next to none
        sigma = torch.tensor(self._noise_in_training, dtype=torch.float64)
        total, n_targets = 0.0, 0.0
        for losses, w, n in self._losses(fitted, fitted.train, draws, n_draws):
            nll = nats(fitted.inspected.likelihood, losses, sigma, n)
            total += float(w @ nll.mean(-1))
            n_targets += float(w.sum()) * n
        self.elbo_ = -total - self.kl_
        self._check_loss(total / n_targets)
        if self._is_frozen() and fitted.held_out is not None:
            self._compare(fitted, draws, n_draws)

    def _forget(self) -> None:
        del self._elbo, self._noise_in_training

    def _summary(self) -> str:
        return (
            f"{self.posterior} posterior over "
            f"{self.posterior_.layout.n_parameters:,} weights, ELBO {self.elbo_:.1f}, "
            f"KL {self.kl_:.1f} (weight {self.kl_weight:g})"
        )

    def _check_loss(self, loss: float) -> None:
        """Overridden where a loss per target says that training has failed."""

    def _losses(
        self, fitted: TrainedNetwork, dataset: Any, draws: Draws, n_draws: int
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Of each batch: losses (b, s) under draws, weights (b,), targets per row."""
        likelihood = fitted.inspected.likelihood
        for drawn, y, w in self._drawn_rows(fitted, dataset, draws, n_draws):
            targets = likelihood.targets(y, drawn[..., 0])
            found = [likelihood.loss(f, targets) for f in drawn.unbind(-1)]
            losses = torch.stack(found, -1)
            w = weighted(likelihood, targets, w)
            weights = torch.ones_like(losses[:, 0]) if w is None else w.to(losses)
            yield losses, weights, likelihood.n_targets(drawn.shape[1])

    def _compare(self, fitted: TrainedNetwork, draws: Draws, n_draws: int) -> None:
        """Warn where held-out rows say that the network was better before."""
        before = replace(fitted, net=copied(self._net())).forward()

        def first(_forward: Forward, x: Any) -> Tensor:
            with torch.no_grad():
                outputs: Tensor = before(x)
            return outputs.double().unsqueeze(-1)

        with before.frozen():
            known = self._held_out_nll(fitted, first, 1, is_learned=False)
        change = self._held_out_nll(fitted, draws, n_draws, is_learned=True) - known
        noise = change.std() / len(change) ** 0.5
        if change.mean() > max(2 * noise, NOTABLE_RISE):
            warnings.warn(
                f"The posterior predicts the {len(change)} rows that the net holds out "
                f"worse than the network that it started from: by {change.mean():.2g} "
                "nats per row. Train longer (max_epochs), lower kl_weight, or use "
                "LaplaceClassifier or LaplaceRegressor, which keep the network.",
                UserWarning,
                stacklevel=4,
            )

    def _held_out_nll(
        self, fitted: TrainedNetwork, draws: Draws, n_draws: int, *, is_learned: bool
    ) -> np.ndarray:
        """Negative log-likelihood of held-out rows, averaged over draws, (n,)."""
        likelihood = fitted.inspected.likelihood
        parts = list(self._losses(fitted, fitted.held_out, draws, n_draws))
        losses, n_targets = torch.cat([part[0] for part in parts]), parts[0][2]
        sigma = torch.tensor(self._noise_in_training, dtype=torch.float64)
        if not is_learned and self._sigma() is None:  # one that has fitted noise, too
            tiny = torch.finfo(torch.float32).tiny
            sigma = (2 * losses.mean() / n_targets).clamp(min=tiny).sqrt()
        nll = nats(likelihood, losses, sigma, n_targets)
        averaged = math.log(nll.shape[1]) - (-nll).logsumexp(1)
        found: np.ndarray = averaged.cpu().numpy()
        return found


def _checked_later(name: str, value: Any) -> None:
    """Values that the prior itself checks."""


def _check_net(net: Any, *, has_likelihood: bool) -> None:
    """Refuse nets whose training would not be what they say."""
    kind = type(net)
    owner = next(base for base in kind.__mro__ if "get_loss" in vars(base))
    if not (has_likelihood or owner.__module__.startswith("skorch.")):
        raise ValueError(
            f"estimator is a {kind.__name__}, whose get_loss would not be used: the "
            "objective is made of the likelihood that belongs to its criterion. Leave "
            "get_loss as skorch has it, or pass likelihood."
        )
    if getattr(net, "optimizer__param_groups", None):
        raise ValueError(
            "optimizer__param_groups names parameters of the module, in whose place "
            "those of their distributions are trained. Leave it out."
        )
    if net.max_epochs == 0:
        raise ValueError(
            "The net has max_epochs=0, so that no distribution would be learned. "
            "Choose 1 or more; distributions need more epochs than weights."
        )
    for callback in _callbacks(net):
        if isinstance(callback, PriorCallback | ParamMapper):
            raise ValueError(
                f"The callback {type(callback).__name__} is about parameters of the "
                "module, in whose place those of their distributions are trained. "
                "Leave it out; parameters with requires_grad=False stay as they are."
            )


def _check_optimizer(net: Any) -> None:
    """Refuse steps by losses of other draws, and a second prior."""
    for group in net.optimizer_.param_groups:
        if group.get("line_search_fn"):
            raise ValueError(
                f"The optimizer has line_search_fn={group['line_search_fn']!r}, which "
                "compares losses under different draws of the weights. Set "
                "optimizer__line_search_fn=None, or use torch.optim.Adam."
            )
        if group.get("weight_decay"):
            raise ValueError(
                f"The optimizer has weight_decay={group['weight_decay']}, which would "
                "pull at the parameters of the distributions. Set "
                "optimizer__weight_decay=0; prior_scale says how wide weights may be."
            )


def _callbacks(net: Any) -> list[Any]:
    """Callbacks that were given, without their names."""
    given = getattr(net, "callbacks", None)
    if given is None or isinstance(given, str):
        return []
    return [entry[1] if isinstance(entry, tuple) else entry for entry in given]

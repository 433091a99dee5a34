"""VariationalClassifier and VariationalRegressor: Bayes by Backprop."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from sklaplace.core.checks import check_params, warn_user
from sklaplace.core.linalg import as_number, plain
from sklaplace.estimators.options.constraints import (
    COUNT,
    LEVELS,
    POSITIVE,
    one_of,
    option,
)
from sklaplace.estimators.options.given_net import inner_net, is_frozen
from sklaplace.estimators.predicting.output_model import (
    BatchedOutputs,
    OutputModel,
    PointOutputs,
    WeightDraws,
)
from sklaplace.estimators.probabilistic_classifier import ProbabilisticClassifier
from sklaplace.estimators.probabilistic_regressor import ProbabilisticRegressor
from sklaplace.estimators.sampling import BaseSampling
from sklaplace.estimators.targets.numbers import geometric_mean
from sklaplace.estimators.training.trainer import Trainer
from sklaplace.estimators.training.variational import VariationalTrainer
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.networks.training import copied
from sklaplace.variational.elbo import KL_SCHEDULES, Elbo, sample_nll
from sklaplace.variational.family import PosteriorFamily
from sklaplace.variational.priors import PRIORS, WeightPrior

# Number of draws for the evidence lower bound. Averaging over samples keeps the noise
# small.
ELBO_DRAWS = 20
# Increase of the held-out loss, in nats per sample, that triggers a warning.
NOTABLE_INCREASE = 0.02


@dataclass(eq=False, repr=False, kw_only=True)
class BaseVariational(BaseSampling):
    """Parameters and fit of `VariationalClassifier` and `VariationalRegressor`."""

    posterior: Any = "gaussian"
    posterior_params: dict[str, Any] | None = option(None, Mapping, None)
    prior: str = option("gaussian", one_of(PRIORS.keys()))
    prior_scale: float = option(1.0, POSITIVE)
    prior_params: dict[str, Any] | None = option(None, Mapping, None)
    kl_weight: float = option(0.1, POSITIVE)
    kl_schedule: str = option("uniform", one_of(KL_SCHEDULES.keys()))
    bound: float = option(3.0, POSITIVE)
    n_samples: int = option(100, COUNT)

    _trainer_kind = VariationalTrainer

    # ------------------------------------------------------------------- options
    def _check_options(self) -> None:
        super()._check_options()
        self._family.check(self._weight_prior())

    @property
    def _family(self) -> PosteriorFamily:
        return PosteriorFamily(self.posterior, self.bound, self.posterior_params)

    def _weight_prior(self) -> WeightPrior:
        """Return the prior with its options; raise an error for invalid options.

        A prior is a dataclass, and its fields are its options.
        """
        kind, params = PRIORS[self.prior], self.prior_params
        names = {field.name for field in fields(kind)}
        # options of several priors, which are parameters of the estimator
        common: dict[str, Any] = {"scale": self.prior_scale, "bound": self.bound}
        # here, only names are checked; the prior checks the values of its own options
        checks = dict.fromkeys(names - set(common), lambda name, value: None)
        check_params("prior_params", params, checks, f"prior={self.prior!r}")
        accepted = {name: common[name] for name in names & set(common)}
        return kind(**accepted, **(params or {}))

    @property
    def _given_noise(self) -> float | None:
        """Noise in the objective if it is given as a number, else None.

        The noise is in the network's units. A classifier has no noise.
        """
        noise = getattr(self, "sigma_noise", "learned")
        if isinstance(noise, str):
            return None
        return geometric_mean(noise) / self._targets.noise_unit

    # ------------------------------------------------------------- collaborators
    def _trainer(self, **options: object) -> Trainer:
        """Return the trainer with the evidence lower bound to maximise."""
        elbo = Elbo(
            family=self._family,
            prior=self._weight_prior(),
            kl_weight=float(self.kl_weight),
            schedule=self.kl_schedule,
            sigma=self._given_noise,
        )
        return super()._trainer(elbo=elbo, n_samples=int(self.n_samples))

    def _output_model(self) -> OutputModel:
        return WeightDraws(int(self.n_samples), self._seed, self.posterior_)

    # ------------------------------------------------------------------ after fit
    def _set_fitted(self, trainer: Any, network: TrainedNetwork) -> None:
        """Set the fitted attributes, including the evidence lower bound.

        The bound is the expected log-likelihood of the training samples, averaged over
        draws of the weights, minus the divergence from the prior. Warn if the posterior
        predicts held-out samples worse than the frozen net that training started from.
        """
        self.posterior_ = trainer.posterior
        super()._set_fitted(trainer, network)
        # no more draws than predictions use, which fit into memory, but at least two
        n_draws = min(ELBO_DRAWS, max(2, self.n_samples))
        model = WeightDraws(n_draws, self._seed, self.posterior_)
        # further draws may estimate the divergence: to be independent of those of the
        # model, they continue its random stream, so skip these
        generator = torch.Generator().manual_seed(self._seed)
        self.posterior_.sample(n_draws, generator)
        self.kl_ = float(self.posterior_.kl(n_draws, generator))
        outputs = BatchedOutputs(network, model, self.batch_size)
        # use the objective's noise: ``sigma_noise_`` can be close to zero if draws vary
        likelihood = network.spec.likelihood
        nll, n_targets = 0.0, 0.0  # negative log-likelihood; targets times weights
        # losses (b, c, s), weights (b,), and the number of targets per sample
        for losses, w, n in outputs.losses_of(network.train):
            nll += float(w @ sample_nll(likelihood, losses, trainer.noise, n).mean(-1))
            n_targets += float(w.sum()) * n
        # the density of y is that of normalised targets, divided by their unit
        log_unit = math.log(self._targets.noise_unit)
        self.elbo_ = -nll - self.kl_ - log_unit * n_targets
        if is_frozen(self.estimator) and network.held_out is not None:
            # without a frozen net, training did not start from trained weights
            self._warn_if_worse(network, outputs, trainer.noise)

    def _warn_if_worse(
        self, network: TrainedNetwork, outputs: BatchedOutputs, sigma: torch.Tensor
    ) -> None:
        """Warn if the posterior predicts held-out samples worse than the frozen net.

        ``outputs`` are those of the posterior, with the noise ``sigma``. The increase
        of the loss must be both notable and significant (more than two standard
        errors).
        """
        initial = TrainedNetwork(copied(inner_net(self.estimator)), network.spec)
        # a single draw; the seed 0 is not used
        initial_outputs = BatchedOutputs(initial, PointOutputs(1, 0), self.batch_size)
        # if the noise was fitted for the posterior, fit the noise for the network too
        noise = None if self._given_noise is None else sigma
        with initial.forward().frozen():
            initial_nll = _held_out_nll(initial_outputs, network.held_out, noise)
        change = _held_out_nll(outputs, network.held_out, sigma) - initial_nll
        standard_error = change.std() / len(change) ** 0.5
        if change.mean() > max(2 * standard_error, NOTABLE_INCREASE):
            warn_user(
                f"The posterior predicts the {len(change)} rows that the net holds out "
                f"worse than the network that it started from: by {change.mean():.2g} "
                "nats per row. Train longer (max_epochs), lower kl_weight, or use "
                "LaplaceClassifier or LaplaceRegressor."
            )


def _held_out_nll(outputs: BatchedOutputs, dataset: Any, sigma: Any) -> np.ndarray:
    """Return the negative log of each sample's likelihood, averaged over draws, (n,).

    If ``sigma`` is None, the noise is estimated from the residuals.
    """
    likelihood = outputs.network.spec.likelihood
    # losses, weights (not used), and the number of targets per sample, which is the
    # same in all batches
    batches, _, (n_targets, *_) = zip(*outputs.losses_of(dataset), strict=True)
    losses = torch.cat(batches)  # (n, c, s)
    if sigma is None:
        tiny = torch.finfo(torch.float32).tiny  # avoids the logarithm of zero
        mean = losses.mean((0, 2))
        # a loss is half the sum of squares of n_targets / c residuals
        sigma = (2 * mean * len(mean) / n_targets).clamp(min=tiny).sqrt()
    nll = sample_nll(likelihood, losses, sigma, n_targets)
    # minus the log of the mean likelihood over the s draws
    averaged = math.log(nll.shape[1]) - (-nll).logsumexp(1)
    return np.asarray(averaged.cpu().numpy())


@dataclass(eq=False, repr=False, kw_only=True)
class VariationalClassifier(BaseVariational, ProbabilisticClassifier):
    """Class probabilities from a skorch net with distributions over its weights.

    Bayes by Backprop learns the distribution of each weight by maximising the evidence
    lower bound. Prefer `LaplaceClassifier` for a network that is already trained. Use
    this estimator to study weight distributions, or as a baseline.

    Read more in the :doc:`User Guide </user_guide/other_methods>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network. A skorch net is cloned, and the medians of the distributions start
        at its initial weights. For a trained net in a
        ``sklearn.frozen.FrozenEstimator``, the medians start at the trained weights.
        If None, use a small network for tabular data, including data frames.
    posterior : {"gaussian", "kumaraswamy", "quantile", "density"}, class or instance, \
            default="gaussian"
        Family of the weight distributions. All families except ``"gaussian"`` are
        experimental. A custom family is a subclass of
        `sklaplace.variational.WeightPosterior`. If an instance is passed,
        such as ``posterior_.distribution`` of an earlier fit, training starts at a copy
        of this instance instead of at the network's weights.
    posterior_params : dict, default=None
        Options of the family. ``quantile`` accepts ``n_units`` (4), the number of units
        in each hidden layer, and ``n_layers`` (1), the number of hidden layers.
        ``density`` accepts ``n_units`` (6), ``n_layers`` (1) and ``n_nodes`` (16), the
        number of grid nodes. A custom class accepts the options that are listed in its
        ``checks`` attribute.
    prior : {"gaussian", "scale_mixture", "uniform"}, default="gaussian"
        Prior distribution of each weight.
    prior_scale : float, default=1.0
        Standard deviation of the prior; for ``scale_mixture``, of its wide component.
    prior_params : dict, default=None
        Options of the prior. ``scale_mixture`` accepts ``weight`` (0.5), the weight of
        the wide component, and ``narrow`` (exp(-6)), the standard deviation of the
        narrow component.
    kl_weight : float, default=0.1
        Factor that multiplies the KL divergence from the prior in the objective. A
        value of one corresponds to the evidence lower bound, which underfits if there
        are few samples per weight. Values below one lead to a cold posterior, which is
        narrower than the posterior under Bayes' rule. ``elbo_`` is always computed with
        a factor of one.
    kl_schedule : {"uniform", "blundell"}, default="uniform"
        Distribution of the KL divergence over the batches of an epoch: equal parts, or
        half for the first batch, a quarter for the second batch, and so on.
    bound : float, default=3.0
        Largest magnitude of weights with ``posterior="kumaraswamy"`` or
        ``prior="uniform"``.
    n_samples : int, default=100
        Number of weight draws over which predictions are averaged. Every call uses the
        same draws.
    likelihood, class_weight, dirichlet_approx, batch_size, random_state, verbose
        As in `LaplaceClassifier`.

    Attributes
    ----------
    estimator_ : skorch net
        The net with weights at the medians of their distributions. Its history has
        ``kl`` and ``elbo`` for each epoch.
    posterior_ : VariationalPosterior
        Distributions of the weights.
    elbo_ : float
        Evidence lower bound of the training samples, in nats, averaged over up to 20
        draws.
    kl_ : float
        KL divergence from the prior, in nats. The value is exact for families with a
        ``closed_form``, such as ``"gaussian"`` and ``"kumaraswamy"``, combined with
        priors other than ``"scale_mixture"``. Otherwise, the divergence is estimated
        from the draws of ``elbo_``.
    classes_, n_features_in_, feature_names_in_, n_iter_
        As in `LaplaceClassifier`.

    See Also
    --------
    VariationalRegressor : For real-valued targets.
    LaplaceClassifier : Gaussian posterior around trained weights.

    Notes
    -----
    All parameters that require gradients have independent distributions. Buffers and
    all other parameters are not random. skorch's training loop runs unchanged, with the
    net's callbacks, validation and device. In the history, ``train_loss`` is the
    objective in nats per sample, and ``valid_loss`` is the loss at the medians. The
    losses are those of the criterion's likelihood.

    A training step takes about as long as a training step of the plain network. With
    many weights and little work per batch, it takes several times as long. The
    distributions need more epochs to converge than plain weights. Prediction requires
    ``n_samples`` forward passes and stores ``n_samples`` copies of the weights. A
    Laplace approximation around a trained network trains and predicts faster; the user
    guide compares both.

    With a frozen net, ``fit`` warns if the posterior predicts held-out samples (from
    ``X_val``, else from the net's ``train_split``) worse than the frozen net does.

    References
    ----------
    Blundell, Cornebise, Kavukcuoglu and Wierstra (2015), "Weight uncertainty in neural
    networks". Graves (2011), "Practical variational inference for neural networks".
    Wenzel et al. (2020), "How good is the Bayes posterior in deep neural networks
    really?", on factors of the divergence below one.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import VariationalClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = VariationalClassifier(random_state=0).fit(X, y)
    >>> model.predict_proba(X[:2]).shape
    (2, 3)
    >>> bool(model.score(X, y) > 0.9)
    True
    """


@dataclass(eq=False, repr=False, kw_only=True)
class VariationalRegressor(BaseVariational, ProbabilisticRegressor):
    """Predictive intervals from a skorch net with distributions over its weights.

    This estimator is the counterpart of `VariationalClassifier` for real-valued
    targets. The observation noise is estimated during training. Prefer
    `LaplaceRegressor` for a network that is already trained.

    Read more in the :doc:`User Guide </user_guide/other_methods>`.

    Parameters
    ----------
    sigma_noise : float, array or {"auto", "learned"}, default="auto"
        Standard deviation of the observation noise, in units of ``y``, for nets with
        ``MSELoss``. An array has one value per column of ``y``, and a name chooses one
        level per column. With ``"learned"``, the noise maximises the objective. With
        ``"auto"``, the noise is estimated during and after training from held-out
        samples: from ``X_val``, else from the net's ``train_split``, else from
        ``validation_fraction``. Without held-out samples, ``"auto"`` means
        ``"learned"``.
    validation_fraction : float, default=0.2
        Fraction of the samples to hold out for estimating the noise, if the net is not
        frozen and holds out no samples itself, and if there are at least 50 distinct
        samples.
    normalize_y : bool, default=False
        As in `LaplaceRegressor`. In the history, ``elbo`` refers to the normalised
        targets.
    estimator, posterior, posterior_params, prior, prior_scale, prior_params, \
            kl_weight, kl_schedule, bound, n_samples
        As in `VariationalClassifier`; ``n_samples`` must be at least two.
    likelihood, batch_size, random_state, verbose
        As in `LaplaceRegressor`.

    Attributes
    ----------
    elbo_ : float
        As in `VariationalClassifier`, with the noise used in training.
    sigma_noise_ : float or ndarray of shape (n_outputs,)
        Standard deviation of the observation noise in use, or 1 for criteria without
        noise.
    estimator_, posterior_, kl_
        As in `VariationalClassifier`.
    sigma_scaling_, n_features_in_, feature_names_in_, n_iter_
        As in `LaplaceRegressor`.

    See Also
    --------
    VariationalClassifier : For class labels.
    LaplaceRegressor : Gaussian posterior around trained weights.

    Notes
    -----
    See `VariationalClassifier` for the distributions, the objective, the cost and the
    warning for frozen nets.

    References
    ----------
    Blundell, Cornebise, Kavukcuoglu and Wierstra (2015), "Weight uncertainty in neural
    networks". Graves (2011), "Practical variational inference for neural networks".
    Wenzel et al. (2020), "How good is the Bayes posterior in deep neural networks
    really?", on factors of the divergence below one.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklaplace import VariationalRegressor
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = VariationalRegressor(random_state=0).fit(X, y)
    >>> mean, std = model.predict(X[:2], return_std=True)
    >>> mean.shape, std.shape
    ((2,), (2,))
    """

    sigma_noise: Any = option("auto", one_of({"auto", "learned"}), LEVELS)

    def _chosen_noise(self, trainer: Any, network: TrainedNetwork) -> ArrayLike:
        """Return the noise that the training learned, unless the noise is given.

        With "auto", held-out samples determine the noise again after training.
        """
        is_learned = self._given_noise is None and (
            self.sigma_noise == "learned" or network.held_out is None
        )
        if is_learned and network.spec.likelihood.has_noise:
            return plain(as_number(trainer.noise))
        return super()._chosen_noise(trainer, network)

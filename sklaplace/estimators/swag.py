"""SWAGClassifier and SWAGRegressor: a Gaussian from iterates of gradient descent."""

from dataclasses import dataclass
from typing import Any

import torch
from skorch import NeuralNet

from sklaplace.core import progress
from sklaplace.core.budget import require_bytes
from sklaplace.core.checks import plain
from sklaplace.curvature.descent import SCHEDULE_CHECKS, Schedule
from sklaplace.curvature.layout import Layout
from sklaplace.data.dataset import TrainingData
from sklaplace.estimators.options.constraints import (
    COUNT,
    POSITIVE,
    TWO_OR_MORE,
    option,
)
from sklaplace.estimators.predicting.output_model import (
    OutputModel,
    WeightDraws,
    require_draws,
)
from sklaplace.estimators.probabilistic_classifier import ProbabilisticClassifier
from sklaplace.estimators.probabilistic_regressor import ProbabilisticRegressor
from sklaplace.estimators.sampling import BaseSampling
from sklaplace.estimators.training.prior_callback import PriorCallback, refuse_callbacks
from sklaplace.estimators.training.trainer import Trainer
from sklaplace.networks.outputs import OutputSpec, as_forward
from sklaplace.networks.trained import TrainedNetwork
from sklaplace.posterior.swag import SWAGPosterior
from sklaplace.variational.module import random_weights

# Number of additional weight-sized vectors for the running moments.
N_VECTORS = 8


@dataclass(kw_only=True)
class SWAGTrainer(Trainer):
    """Trainer that continues training by gradient descent and collects the iterates.

    Attributes
    ----------
    schedule : Schedule
        Schedule of the descent.
    max_rank : int
        Number of iterates whose deviations are kept.
    n_samples : int
        Number of weight draws for predictions.
    """

    schedule: Schedule
    max_rank: int
    n_samples: int

    def train(self, data: TrainingData) -> TrainedNetwork:
        """Train the network, continue with the descent, and return it at the mean.

        The attribute ``posterior`` is the Gaussian of the iterates of the descent.
        """
        trained = super().train(data)
        self.posterior = self._collect(trained)
        module = as_forward(trained.net).module
        # in place, so ``trained`` changes
        self.posterior.layout.write(self.posterior.mean, module)
        return trained

    def infer_spec(
        self, net: NeuralNet, dataset: object, *, is_trained: bool
    ) -> OutputSpec:
        """Return the output specification; raise an error for unsupported nets."""
        self._weight_layout(net)  # only for its errors, before any training
        return super().infer_spec(net, dataset, is_trained=is_trained)

    def _weight_layout(self, net: NeuralNet) -> Layout:
        """Return the layout of the weights with a distribution; raise if unsupported.

        The deviations and the draws of all these weights must fit into memory. The
        deviations are differences of the last iterates from the running mean, and give
        the covariances.
        """
        refuse_callbacks(net, PriorCallback)
        module = as_forward(net).module
        names = [n for n, p in module.named_parameters() if p.is_complex()]
        if names:
            raise ValueError(
                f"The network has complex weights ({names[0]!r}), which are not "
                "supported. Use the real and the imaginary part as parameters."
            )
        layout = random_weights(module)
        require_draws(self.n_samples, layout.n_parameters)
        require_bytes(  # eight bytes per float64 number
            8 * (self._rank + N_VECTORS) * layout.n_parameters,
            "cpu",
            f"max_rank={self._rank:,} deviations of {layout.n_parameters:,} weights",
            "set a smaller max_rank",
        )
        return layout

    @property
    def _rank(self) -> int:
        """Number of deviations."""
        return min(self.max_rank, self.schedule.n_snapshots)

    def _collect(self, trained: TrainedNetwork) -> SWAGPosterior:
        """Run the descent and return the Gaussian of its iterates.

        The moments are the mean and variance of the weights over the snapshots, and
        differences of the last snapshots from the running mean. Raise ValueError if the
        descent diverges.
        """
        layout = self._weight_layout(trained.net)
        with progress.phase("snapshots"):
            descent = self.descent(trained)
            moments = descent.moments(layout, self.schedule, self._rank)
        deviations = torch.stack([*moments.deviations])
        posterior = SWAGPosterior(moments.mean, moments.variance, deviations, layout)
        if not posterior.variance().isfinite().all():
            raise ValueError(
                f"lr={self.schedule.lr:g} is too large: gradient descent from the "
                "trained weights has diverged. Lower lr, or scale X and y."
            )
        return posterior


@dataclass(eq=False, repr=False, kw_only=True)
class BaseSWAG(BaseSampling):
    """Parameters and ``fit`` method of `SWAGClassifier` and `SWAGRegressor`."""

    n_snapshots: int = option(100, TWO_OR_MORE)
    steps_per_snapshot: int = option(10, COUNT)
    lr: float = option(0.01, POSITIVE)
    max_rank: int = option(20, TWO_OR_MORE)
    n_samples: int = option(100, COUNT)

    _trainer_kind = SWAGTrainer

    def _trainer(self, **options: object) -> Trainer:
        """Return the trainer with the schedule of its steps, as plain numbers."""
        schedule = {name: getattr(self, name) for name in SCHEDULE_CHECKS}
        counts = {"max_rank": self.max_rank, "n_samples": self.n_samples}
        return super()._trainer(schedule=Schedule(**plain(schedule)), **plain(counts))

    def _set_fitted(self, trainer: Any, network: TrainedNetwork) -> None:
        self.posterior_ = trainer.posterior
        super()._set_fitted(trainer, network)

    def _check_loss(
        self, loss: float, data: TrainingData, rate: str = "the learning rate"
    ) -> None:
        """Warn if the training loss is that of guessing, and name ``lr``."""
        # with large steps, finite iterates can be far from any minimum
        super()._check_loss(loss, data, f"lr={self.lr:g}, or {rate} of the net")

    def _output_model(self) -> OutputModel:
        return WeightDraws(int(self.n_samples), self._seed, self.posterior_)


@dataclass(eq=False, repr=False, kw_only=True)
class SWAGClassifier(BaseSWAG, ProbabilisticClassifier):
    """Classifier with stochastic weight averaging-Gaussian (SWAG).

    Stochastic gradient descent continues from the trained weights at a constant
    learning rate. The mean and covariance of its iterates define a Gaussian over all
    weights that require gradients. Probabilities are averaged over networks drawn from
    this Gaussian. This estimator is a baseline for `LaplaceClassifier`, which needs no
    extra training, and derives the variance from the curvature of the loss instead of
    from a learning rate.

    Read more in the :ref:`User Guide <swag>`.

    Parameters
    ----------
    estimator : skorch net, FrozenEstimator or None, default=None
        The network. A skorch net is cloned and trained in ``fit``, and the descent
        starts at its trained weights. With a ``sklearn.frozen.FrozenEstimator``, the
        descent starts at the given weights. If None, use a small network for tabular
        data, including data frames.
    n_snapshots : int, default=100
        Number of iterates to collect, at least two.
    steps_per_snapshot : int, default=10
        Number of gradient descent steps from one collected iterate to the next.
    lr : float, default=0.01
        Learning rate of gradient descent on the net's criterion. Larger values increase
        the variance of the weights.
    max_rank : int, default=20
        Number of final iterates whose deviations form the low-rank part of the
        covariance; at least two.
    n_samples : int, default=100
        Number of weight draws over which predictions are averaged. Every call uses the
        same draws.
    likelihood, class_weight, dirichlet_approx, batch_size, random_state, verbose
        As in `LaplaceClassifier`.

    Attributes
    ----------
    estimator_ : skorch net
        The net with weights at the mean of the iterates (stochastic weight averaging).
    posterior_ : SWAGPosterior
        Gaussian over the weights that require gradients.
    classes_, n_features_in_, feature_names_in_, n_iter_
        As in `LaplaceClassifier`.

    See Also
    --------
    LaplaceClassifier : Gaussian posterior around trained weights.
    SWAGRegressor : For real-valued targets.

    Notes
    -----
    The mean number of samples per step is the net's ``batch_size``, but at most a tenth
    of all samples. The samples of each step are selected by hashes of the inputs, so
    the order of the samples does not matter. The descent uses the net's own loss and
    the weight decay of its optimizer. The network is in evaluation mode: dropout is
    inactive, and batch normalisation keeps its trained statistics, which are not
    recomputed for draws.

    After training, ``fit`` requires ``n_snapshots * steps_per_snapshot`` steps, and one
    pass over the samples for the loss at the mean of the iterates. ``fit`` warns if
    this loss is more than twice that of random guessing. ``fit`` stores
    ``max_rank + 2`` copies of the weights. Prediction stores ``n_samples`` copies of
    the weights and requires ``n_samples`` forward passes.

    References
    ----------
    Maddox, Garipov, Izmailov, Vetrov and Wilson (2019), "A simple baseline for Bayesian
    uncertainty in deep learning". Izmailov et al. (2018), "Averaging weights leads to
    wider optima and better generalization". Mandt, Hoffman and Blei (2017), "Stochastic
    gradient descent as approximate Bayesian inference", on the learning rate.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import SWAGClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = SWAGClassifier(random_state=0).fit(X, y)
    >>> model.predict_proba(X[:2]).shape
    (2, 3)
    >>> model.posterior_.deviations.shape[0]
    20
    """


@dataclass(eq=False, repr=False, kw_only=True)
class SWAGRegressor(BaseSWAG, ProbabilisticRegressor):
    """Regressor with stochastic weight averaging-Gaussian (SWAG).

    This estimator is the counterpart of `SWAGClassifier` for real-valued targets. See
    `SWAGClassifier` for the method and its uses.

    Read more in the :ref:`User Guide <swag>`.

    Parameters
    ----------
    sigma_noise : float, array or "auto", default="auto"
        Standard deviation of the observation noise, in units of ``y``, for nets with
        ``MSELoss``. An array has one value per column of ``y``. ``"auto"`` chooses one
        level per column, which maximises the likelihood of held-out targets: from
        ``y_val``, else from the net's ``train_split``, else from
        ``validation_fraction``. Without held-out targets (a frozen net, or fewer than
        50 distinct samples), ``"auto"`` uses the training targets.
    validation_fraction : float, default=0.2
        Fraction of the samples to hold out for estimating the noise, if the net is
        trained in ``fit`` and holds out no samples itself, and if there are at least 50
        distinct samples.
    normalize_y : bool, default=False
        As in `LaplaceRegressor`. If True, the same learning rate suits targets in any
        units.
    estimator, n_snapshots, steps_per_snapshot, lr, max_rank, n_samples
        As in `SWAGClassifier`; ``n_samples`` must be at least two.
    likelihood, batch_size, random_state, verbose
        As in `LaplaceRegressor`.

    Attributes
    ----------
    sigma_noise_ : float or ndarray of shape (n_outputs,)
        Standard deviation of the observation noise in use, or 1 for criteria without
        noise.
    estimator_, posterior_
        As in `SWAGClassifier`.
    sigma_scaling_, n_features_in_, feature_names_in_, n_iter_
        As in `LaplaceRegressor`.

    See Also
    --------
    LaplaceRegressor : Gaussian posterior around trained weights.
    SWAGClassifier : For class labels.

    Notes
    -----
    The descent and its cost are the same as in `SWAGClassifier`.

    References
    ----------
    Maddox, Garipov, Izmailov, Vetrov and Wilson (2019), "A simple baseline for Bayesian
    uncertainty in deep learning".

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklaplace import SWAGRegressor
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = SWAGRegressor(random_state=0).fit(X, y)
    >>> mean, std = model.predict(X[:2], return_std=True)
    >>> mean.shape, std.shape
    ((2,), (2,))
    """

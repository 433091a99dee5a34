"""BaseSampling: estimators that predict from draws of a network's outputs."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from numpy.typing import ArrayLike
from sklearn.base import is_regressor
from sklearn.utils.validation import check_is_fitted

from sklaplace.core import progress
from sklaplace.core.checks import check_count
from sklaplace.core.random import private_rng
from sklaplace.core.trees import Inputs
from sklaplace.data.dataset import TrainingData
from sklaplace.estimators.base import NetEstimator
from sklaplace.estimators.fitting.noise import most_probable_noise
from sklaplace.estimators.options.given_net import inner_net, is_frozen
from sklaplace.estimators.predicting.output_model import (
    BatchedOutputs,
    OutputModel,
    PointOutputs,
)
from sklaplace.estimators.targets.numbers import (
    check_normalize_y,
    geometric_mean,
    has_noise,
)
from sklaplace.estimators.training.samples import (
    Samples,
    draw_seed,
    warn_of_weight_scale,
)
from sklaplace.estimators.training.trainer import Trainer
from sklaplace.networks.trained import TrainedNetwork, n_epochs


@dataclass(eq=False, repr=False, kw_only=True)
class BaseSampling(NetEstimator):
    """Parameters and ``fit`` method of estimators that predict from draws."""

    if TYPE_CHECKING:  # provided by a subclass or the other base class
        sigma_noise: Any
        normalize_y: bool
        validation_fraction: float

        def _check_loss(
            self, loss: float, data: TrainingData, rate: str = ...
        ) -> None: ...
        def _set_noise(self, sigma: Any) -> None: ...

    _trainer_kind: ClassVar[type[Trainer]] = Trainer

    def fit(
        self,
        X: Inputs,
        y: ArrayLike | None = None,  # None raises an error with instructions
        sample_weight: ArrayLike | None = None,
        *,
        groups: ArrayLike | None = None,
        X_val: Inputs | None = None,
        y_val: ArrayLike | None = None,
        groups_val: ArrayLike | None = None,
        **fit_params: object,
    ) -> Any:
        """Train the network, and estimate the noise unless it is given.

        Parameters
        ----------
        X : array-like of shape (n, ...), dict of arrays, or torch Dataset
            Training samples. Arrays, sparse matrices and data frames are validated and
            cast to the network's dtype. All other inputs are passed to skorch
            unchanged. Sparse matrices are converted to dense arrays one batch at a
            time.
        y : array-like of shape (n,) or (n, n_outputs)
            Targets. For a classifier, class labels of any type, a matrix of 0/1 labels,
            or one array of labels per sample.
        sample_weight : array-like of shape (n,), optional
            Non-negative sample weights. Weights are interpreted as counts: a sample
            with weight two counts as two samples. If your weights are relative, scale
            them to a mean of one.
        groups : array-like of shape (n,), optional
            Group labels (strings or integers), such as patient IDs. The samples of a
            group are either all used for training, or all held out for estimating the
            noise.
        X_val, y_val : optional
            Held-out samples that the network is not trained on. Regressors estimate the
            observation noise from these samples. Other uses of these samples are
            described in the documentation of each estimator.
        groups_val : array-like of shape (n_val,), optional
            Group labels of ``X_val``, which are only checked: the noise has one level
            per column, which does not depend on groups.
        **fit_params : dict
            Arguments for the ``fit`` method of the skorch net. Predictions do not use
            these arguments, so they must not change the module's outputs.

        Returns
        -------
        object
            The fitted estimator.

        Raises
        ------
        ValueError, TypeError
            If an option, the data or the network is invalid. The error leaves the
            estimator, the network and the data unchanged.

        See Also
        --------
        sklaplace.LaplaceClassifier.fit : Also accepts a trained network.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklaplace import DeepEnsembleClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = DeepEnsembleClassifier(n_estimators=2, random_state=0).fit(X, y)
        >>> model.classes_
        array([0, 1, 2])
        """
        held_out: Any = {"X_val": X_val, "y_val": y_val, "groups_val": groups_val}
        samples = Samples(
            X, y, sample_weight, groups, **held_out, fit_params=fit_params
        )
        with self._reported():
            return self._fit(samples)

    def _fit(self, samples: Samples) -> Any:
        """Fit to samples as passed by the user, and return the estimator.

        The trainer trains the network, and holds out samples if the noise is estimated
        from them. `_set_fitted` then adds what the subclass predicts with, and the
        noise. Warn if the trained network has the training loss of an untrained one.
        """
        self._check_options()
        # without a prior, only ratios of the weights matter
        if self.estimator is None or self._trainer_kind.has_prior:
            warn_of_weight_scale(samples.sample_weight)
        data = self._encode(samples)
        self._seed = draw_seed(self.random_state)
        device = getattr(inner_net(self.estimator), "device", "cpu")
        trainer = self._trainer()
        trainer.is_part |= samples.is_part  # then, Ctrl-C raises an error
        # training needs gradients, even if the caller has switched them off
        with private_rng(self._seed, device), torch.inference_mode(False):
            network = trainer.train(data)
            self.estimator_, self.network_spec_ = network.net, network.spec
            self.n_iter_ = n_epochs(network.net)
            with network.forward().frozen():  # evaluation mode
                self._set_fitted(trainer, network)
                self._check_loss(self._training_loss(network), data)
        return self

    def _training_loss(self, network: TrainedNetwork) -> float:
        """Return the mean loss per target at the network's weights.

        The loss is that of the plain network, without a distribution over weights.
        """
        # one draw with the seed 0, which is not used: the outputs are fixed
        at_weights = BatchedOutputs(network, PointOutputs(1, 0), self.batch_size)
        loss, n_targets = 0.0, 0.0
        # losses (b, c, 1 draw), weights (b,), and a number
        for losses, weights, n_per_sample in at_weights.losses_of(network.train):
            loss += float((weights @ losses.mean(-1)).sum())
            n_targets += float(weights.sum()) * n_per_sample
        return loss / n_targets

    def _fit_summary(self) -> list[str]:
        """Return the parts of the summary that describe the training.

        Only some subclasses set ``estimators_`` (ensembles) or ``posterior_``.
        """
        n, phrases = self.n_iter_, []
        if hasattr(self, "estimators_"):  # an ensemble
            phrases.append(f"{len(self.estimators_)} networks")
        if hasattr(self, "posterior_"):
            phrases.append(repr(self.posterior_))
        elif is_frozen(self.estimator):
            return ["weights kept"]
        return [*phrases, f"trained for {n:,} epoch{'' if n == 1 else 's'}"]

    # ------------------------------------------------------------- collaborators
    def _check_options(self) -> None:
        """Raise an error for invalid values."""
        self._check_parameters()
        if is_regressor(self):
            # a variance needs at least two draws; ensembles have no such parameter, and
            # pass with the value 2
            check_count("n_samples", getattr(self, "n_samples", 2), 2)
            check_normalize_y(self.normalize_y, is_frozen(self.estimator))

    def _trainer(self, **options: Any) -> Trainer:
        """Return the trainer; ``options`` are specific to its class.

        The trainer may hold out samples only if the noise is estimated from them.
        """
        fraction = None  # hold out no samples
        if is_regressor(self) and has_noise(self.likelihood, inner_net(self.estimator)):
            is_tuned = isinstance(self.sigma_noise, str) and self.sigma_noise == "auto"
            fraction = self.validation_fraction if is_tuned else None
        return self._new_trainer(self._trainer_kind, fraction, **options)

    def _set_fitted(self, trainer: Any, network: TrainedNetwork) -> None:
        """Set fitted attributes from the trained network, in evaluation mode."""
        if is_regressor(self):
            self._set_noise(self._chosen_noise(trainer, network))

    def _chosen_noise(self, trainer: Any, network: TrainedNetwork) -> ArrayLike:
        """Return the given or the most probable noise, in the network's units.

        The result is one number, or one level for each column. The most probable noise
        uses held-out targets if there are any, and otherwise training targets.
        """
        if not network.spec.likelihood.has_noise:
            return 1.0
        if not isinstance(self.sigma_noise, str):
            # the likelihood has the ratios between the levels of columns; divide by the
            # unit of the targets
            return geometric_mean(self.sigma_noise) / self._targets.noise_unit
        dataset = network.train if network.held_out is None else network.held_out
        with progress.phase("tune"):
            return most_probable_noise(self._outputs_of(network), dataset)

    # ----------------------------------------------------------------- predictions
    @abstractmethod
    def _output_model(self) -> OutputModel:
        """Return the distribution of the outputs."""

    def _outputs_of(self, network: TrainedNetwork) -> BatchedOutputs:
        """Return the distribution of a network's outputs."""
        self._check_settings()
        model = self._output_model()
        return BatchedOutputs(
            network,
            model,
            self.batch_size,
            name=type(self).__name__,
            verbose=self.verbose,
        )

    def _outputs(self) -> BatchedOutputs:
        """Distribution of the fitted network's outputs."""
        check_is_fitted(self)
        return self._outputs_of(TrainedNetwork(self.estimator_, self.network_spec_))

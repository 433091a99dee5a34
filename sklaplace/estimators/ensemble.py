"""DeepEnsembleClassifier and DeepEnsembleRegressor: ensembles of networks."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from joblib.parallel import get_active_backend
from skorch import NeuralNet
from torch import Tensor, nn

from sklaplace.core import progress
from sklaplace.core.parallel import in_parallel
from sklaplace.core.random import private_rng
from sklaplace.core.trees import Batch
from sklaplace.data.dataset import TrainingData
from sklaplace.estimators.options.constraints import COUNT, WORKERS, option
from sklaplace.estimators.options.given_net import inner_net, is_frozen
from sklaplace.estimators.predicting.output_model import OutputModel
from sklaplace.estimators.probabilistic_classifier import ProbabilisticClassifier
from sklaplace.estimators.probabilistic_regressor import ProbabilisticRegressor
from sklaplace.estimators.sampling import BaseSampling
from sklaplace.estimators.training.trainer import Trainer
from sklaplace.networks.forward import Forward
from sklaplace.networks.trained import TrainedNetwork, n_epochs


def _shared_split(split: Any, seed: int, *args: Any, **kwargs: Any) -> Any:
    """Split samples with a seed, so that each network holds out the same samples.

    The noise is then estimated on samples that no network was trained on.
    """
    with private_rng(seed):
        return split(*args, **kwargs)


@dataclass(frozen=True)
class EnsembleDraws(OutputModel):
    """Outputs of all networks, or of networks drawn with replacement.

    Attributes
    ----------
    networks : list of TrainedNetwork
        The networks.
    chosen : tuple of int
        Network indices, one per draw.
    """

    networks: list[TrainedNetwork]
    chosen: tuple[int, ...]

    def draws(self, forward: Forward, x: Batch) -> Tensor:
        """Return the outputs (b, c, s), with one network per draw.

        There are b samples, c outputs and s draws. ``chosen`` has the index of the
        network of each draw. ``forward`` is not used, because it is that of the first
        network only.
        """
        # a network that was drawn several times is called once
        outputs_of: dict[int, Tensor] = {}
        for index in set(self.chosen):
            forward_of_network = self.networks[index].forward()
            with forward_of_network.frozen(), torch.no_grad():
                outputs_of[index] = forward_of_network(x).double()
        return torch.stack([outputs_of[index] for index in self.chosen], -1)

    def redrawn(self, n_samples: int, seed: int) -> "EnsembleDraws":
        """Return the outputs of networks that are drawn with replacement."""
        generator = np.random.default_rng(seed)
        chosen = tuple(generator.integers(len(self.networks), size=n_samples).tolist())
        return replace(self, n_samples=n_samples, seed=seed, chosen=chosen)

    def check_variance(self) -> None:
        """Accept a single network, whose outputs have zero variance."""


@dataclass(kw_only=True)
class EnsembleTrainer(Trainer):
    """Trainer of several networks, each with its own initialisation.

    Attributes
    ----------
    n_estimators : int
        Number of networks.
    n_jobs : int or None
        Number of processes.
    """

    n_estimators: int
    n_jobs: int | None
    is_part: bool = True

    def train(self, data: TrainingData) -> TrainedNetwork:
        """Train networks with the same held-out samples; return the first network."""
        net = inner_net(self.estimator)
        # if neither the user nor the net holds out samples, hold out the same ones for
        # all networks, before each is trained
        if data.validation is None and not getattr(net, "train_split", None):
            split = self.hold_out(data)
            if split is not None:
                train, held_out = split
                data = data.split(train, held_out)
            # a cache of `hold_out`, which would be copied to the worker processes
            self._keyed = None
        # one seed per network, so results do not depend on the number of processes
        seeds = np.random.default_rng(self.seed).integers(2**31, size=self.n_estimators)
        arguments = [(int(seed), data) for seed in seeds]
        n_jobs = _processes(self.n_jobs)
        with progress.phase("train"):
            self.networks = in_parallel(self.train_one, arguments, n_jobs, "networks")
        return self.networks[0]

    def train_one(self, seed: int, data: TrainingData) -> TrainedNetwork:
        """Return one network, initialised and trained with the given seed."""
        device = getattr(inner_net(self.estimator), "device", "cpu")
        with private_rng(seed, device), torch.inference_mode(False):
            return super().train(data)

    def learn(self, net: NeuralNet, data: TrainingData) -> tuple[Any, Any]:
        """Train a net with the split that all networks share; return both parts."""
        if net.train_split:
            net.train_split = partial(_shared_split, net.train_split, self.seed)
        return super().learn(net, data)


@dataclass(eq=False, repr=False, kw_only=True)
class BaseEnsemble(BaseSampling):
    """Parameters and fitting of the two ensemble estimators."""

    n_estimators: int = option(5, COUNT)
    n_jobs: int | None = option(None, *WORKERS)

    _trainer_kind = EnsembleTrainer

    def _check_options(self) -> None:
        """Raise an error for invalid values, and for nets with fixed weights."""
        super()._check_options()
        if is_frozen(self.estimator):
            raise ValueError(
                "An ensemble trains its networks. Pass the net without FrozenEstimator."
            )
        if isinstance(getattr(inner_net(self.estimator), "module", None), nn.Module):
            raise ValueError(
                "estimator has a module instance, so all networks would start with the "
                "same weights. Pass its class, with arguments as module__name=value."
            )

    def _trainer(self, **options: Any) -> Trainer:
        return super()._trainer(n_estimators=self.n_estimators, n_jobs=self.n_jobs)

    def _set_fitted(self, trainer: Any, network: TrainedNetwork) -> None:
        """Set fitted attributes, including the networks of all members."""
        self.estimators_ = [member.net for member in trainer.networks]
        # without the training and held-out samples, which predictions do not need
        self._networks = [TrainedNetwork(n.net, n.spec) for n in trainer.networks]
        super()._set_fitted(trainer, network)
        # the parent's value is that of the first network
        self.n_iter_ = max(n_epochs(net) for net in self.estimators_)

    def _output_model(self) -> OutputModel:
        n = len(self._networks)
        return EnsembleDraws(n, self._seed, self._networks, tuple(range(n)))


def _processes(n_jobs: int | None) -> int | None:
    """Return 1 if joblib uses threads, because only one thread can train at a time."""
    backend, _ = get_active_backend()
    return 1 if getattr(backend, "supports_sharedmem", False) else n_jobs


@dataclass(eq=False, repr=False, kw_only=True)
class DeepEnsembleClassifier(BaseEnsemble, ProbabilisticClassifier):
    """Class probabilities averaged over independently trained skorch nets.

    The networks differ in their seeds for initialisation and training. Deep ensembles
    are the usual baseline for the uncertainty of neural networks. They cost several
    times as much as `LaplaceClassifier`.

    Read more in the :doc:`User Guide </user_guide/other_methods>`.

    Parameters
    ----------
    estimator : skorch net or None, default=None
        The network. ``n_estimators`` clones are trained, each from a separate
        initialisation. ``FrozenEstimator`` is not supported. If None, use a small
        network for tabular data, including data frames.
    n_estimators : int, default=5
        Number of networks. With a single network, predictions are those of a plain
        network.
    n_jobs : int or None, default=None
        Number of joblib processes for training. Results do not depend on this number.
    likelihood, class_weight, dirichlet_approx, batch_size, random_state, verbose
        As in `LaplaceClassifier`.

    Attributes
    ----------
    estimators_ : list of skorch nets
        The trained networks.
    estimator_ : skorch net
        The first trained network.
    n_iter_ : int
        Largest number of training epochs among the networks.
    classes_, n_features_in_, feature_names_in_
        As in `LaplaceClassifier`.

    See Also
    --------
    LaplaceClassifier : Gaussian posterior around one network.
    DeepEnsembleRegressor : For real-valued targets.

    Notes
    -----
    Fitting trains ``n_estimators`` networks, and each prediction requires
    ``n_estimators`` forward passes. All networks are kept in memory. For variances
    between networks, the divisor is the number of networks minus one. Adversarial
    training, which the paper also uses, is not implemented.

    References
    ----------
    Lakshminarayanan, Pritzel and Blundell (2017), "Simple and scalable predictive
    uncertainty estimation using deep ensembles".

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import DeepEnsembleClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = DeepEnsembleClassifier(random_state=0).fit(X, y)
    >>> model.predict_proba(X[:2]).shape
    (2, 3)
    """


@dataclass(eq=False, repr=False, kw_only=True)
class DeepEnsembleRegressor(BaseEnsemble, ProbabilisticRegressor):
    """Predictive intervals from independently trained skorch nets.

    The counterpart of `DeepEnsembleClassifier` for real-valued targets. With
    `sklaplace.likelihoods.HeteroscedasticNLLLoss`, the networks estimate the noise as a
    function of the inputs, as in the paper.

    Read more in the :doc:`User Guide </user_guide/other_methods>`.

    Parameters
    ----------
    sigma_noise : float, array or "auto", default="auto"
        Standard deviation of the observation noise, in units of ``y``, for nets with
        ``MSELoss``. An array has one value per column of ``y``. ``"auto"`` chooses one
        level per column, which maximises the likelihood of held-out targets from
        ``y_val``, else from the net's ``train_split``, else from
        ``validation_fraction``. Without held-out targets (fewer than 50 distinct
        samples), ``"auto"`` uses the training targets.
    validation_fraction : float, default=0.2
        Fraction of the samples to hold out for estimating the noise, if the net itself
        holds out no samples and there are at least 50 distinct samples.
    normalize_y : bool, default=False
        As in `LaplaceRegressor`.
    estimator, n_estimators, n_jobs
        As in `DeepEnsembleClassifier`.
    likelihood, batch_size, random_state, verbose
        As in `LaplaceRegressor`.

    Attributes
    ----------
    sigma_noise_ : float or ndarray of shape (n_outputs,)
        Standard deviation of the observation noise in use, or 1 for criteria without
        noise.
    estimators_, estimator_, n_iter_
        As in `DeepEnsembleClassifier`.
    sigma_scaling_, n_features_in_, feature_names_in_
        As in `LaplaceRegressor`.

    See Also
    --------
    LaplaceRegressor : Gaussian posterior around one network.
    DeepEnsembleClassifier : For class labels.

    Notes
    -----
    Fitting trains ``n_estimators`` networks, and each prediction requires
    ``n_estimators`` forward passes. All networks are kept in memory. For variances
    between networks, the divisor is the number of networks minus one. Adversarial
    training, which the paper also uses, is not implemented.

    References
    ----------
    Lakshminarayanan, Pritzel and Blundell (2017), "Simple and scalable predictive
    uncertainty estimation using deep ensembles".

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklaplace import DeepEnsembleRegressor
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = DeepEnsembleRegressor(random_state=0).fit(X, y)
    >>> mean, std = model.predict(X[:2], return_std=True)
    >>> mean.shape, std.shape
    ((2,), (2,))
    """

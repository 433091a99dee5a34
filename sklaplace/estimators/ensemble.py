"""DeepEnsembleClassifier and DeepEnsembleRegressor: several networks in one."""

from contextlib import ExitStack
from copy import copy
from typing import Any

import numpy as np
import torch
from joblib.parallel import get_active_backend
from sklearn.utils.parallel import Parallel, delayed
from torch import Tensor, nn

from sklaplace.core.checks import check_count, check_n_jobs
from sklaplace.core.random import private_rng
from sklaplace.estimators.outputs import Draws, TrainedNetwork
from sklaplace.estimators.sampling import NoiseFromRows, SamplingEstimator
from sklaplace.estimators.simplex import SimplexPredictor
from sklaplace.networks.data import TrainingData
from sklaplace.networks.forward import Forward


class _SharedSplit:
    """A ``train_split`` that holds the same rows out for each network.

    Rows that another network has learned would say little of the noise.
    """

    def __init__(self, split: Any, seed: int) -> None:
        self.split, self.seed = split, seed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Split under a seed of its own."""
        with private_rng(self.seed):
            return self.split(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.split, name)


class BaseEnsemble(SamplingEstimator):
    """Shared by both estimators; not for direct use."""

    n_estimators: int
    n_jobs: int | None
    estimators_: list[Any]
    _members: list[TrainedNetwork]

    # --------------------------------------------------------------------- fit
    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_n_jobs(self.n_jobs)
        if self._is_frozen():
            raise ValueError(
                "The networks of an ensemble are trained, each from its own start, and "
                "a frozen one has been. Pass the net without FrozenEstimator."
            )
        if isinstance(getattr(self._net(), "module", None), nn.Module):
            raise ValueError(
                "estimator has a module instance, whose weights would be the start of "
                "all networks. Pass its class, with arguments as module__..., so that "
                "each is initialised anew."
            )

    def _fit_network(
        self,
        data: TrainingData,
        validation: TrainingData | None,
        fit_params: dict[str, Any],
    ) -> TrainedNetwork:
        if validation is None and not getattr(self._net(), "train_split", None):
            data, validation = self._hold_out(data)
        seeds = np.random.default_rng(self._seed).integers(
            2**31, size=self.n_estimators
        )
        self._members = Parallel(n_jobs=_processes(self.n_jobs))(
            delayed(_member)(copy(self), data, validation, fit_params, int(seed))
            for seed in seeds
        )
        self.estimators_ = [member.net for member in self._members]
        return self._members[0]

    def _new_net(self, data: TrainingData) -> Any:
        net = super()._new_net(data)
        if net.train_split:
            net.train_split = _SharedSplit(net.train_split, self._seed)
        return net

    def _learn(
        self,
        net: Any,
        data: TrainingData,
        validation: TrainingData | None,
        fit_params: dict[str, Any],
    ) -> tuple[Any, Any]:
        rows = super()._learn(net, data, validation, fit_params)
        if isinstance(net.train_split, _SharedSplit):
            net.train_split = net.train_split.split
        return rows

    def _publish(self, fitted: TrainedNetwork) -> None:
        super()._publish(fitted)
        self.n_iter_ = max(max(1, len(net.history)) for net in self.estimators_)

    def _forget(self) -> None:
        self._members = [
            TrainedNetwork(m.net, m.inspected, None, None) for m in self._members
        ]

    def _summary(self) -> str:
        return f"{len(self.estimators_)} networks, {super()._summary()}"

    # ------------------------------------------------------------------- draws
    def _check_draws(self, smallest: int = 1) -> None:
        check_count("n_estimators", self.n_estimators)

    def _require_variance(self) -> None:
        """One network has the variance zero."""

    @property
    def _n_draws(self) -> int:
        return len(self.estimators_)

    def _own_draws(self) -> Draws:
        return self._outputs_of(list(range(len(self._members))))

    def _drawn(self, n_samples: int, seed: int) -> Draws:
        n_members = len(self._members)
        chosen = np.random.default_rng(seed).integers(n_members, size=n_samples)
        return self._outputs_of(chosen.tolist())

    def _outputs_of(self, chosen: list[int]) -> Draws:
        """Outputs of members by their numbers."""

        def draws(_first: Forward, x: Any) -> Tensor:
            forwards = [self._members[number].forward() for number in set(chosen)]
            with ExitStack() as stack, torch.no_grad():
                for forward in forwards:
                    stack.enter_context(forward.frozen())
                found = {
                    number: forward(x).double()
                    for number, forward in zip(set(chosen), forwards, strict=True)
                }
            return torch.stack([found[number] for number in chosen], -1)

        return draws


def _processes(n_jobs: int | None) -> int | None:
    """One where joblib would take threads, of which one at a time trains."""
    backend, _ = get_active_backend()
    return 1 if getattr(backend, "supports_sharedmem", False) else n_jobs


def _member(
    model: BaseEnsemble,
    data: TrainingData,
    validation: TrainingData | None,
    fit_params: dict[str, Any],
    seed: int,
) -> TrainedNetwork:
    """One network, trained from a start of its own."""
    device = getattr(model._net(), "device", "cpu")
    with private_rng(seed, device), torch.inference_mode(False):
        return SamplingEstimator._fit_network(model, data, validation, fit_params)


class DeepEnsembleClassifier(SimplexPredictor, BaseEnsemble):
    """Class probabilities averaged over networks that start from other weights.

    The usual yardstick for uncertainty of networks, at several times the cost.

    Parameters
    ----------
    estimator : skorch net or None, default=None
        The network; as many clones of it as ``n_estimators`` are trained, each from an
        initialisation of its own. None makes a small network that suits tables.
    likelihood : object or None, default=None
        Of the targets given the outputs, where the criterion is none of those that are
        known; see `sklaplace.likelihoods`. None takes that of the criterion.
    n_estimators : int, default=5
        Number of networks; one is the plain network.
    class_weight : dict, "balanced" or None, default=None
        Weights of the classes, by label, which multiply ``sample_weight``:
        ``"balanced"`` gives all classes the same in total.
    dirichlet_approx : {"projection", "bridge", "bridge_norm", \
            "bridge_norm_published"}, default="projection"
        How the Gaussian of the drawn logits becomes a Dirichlet distribution.
    batch_size : int or None, default=None
        Rows per batch for prediction; None fits them into a fixed memory budget.
        Results do not depend on it. The net has its own for training.
    n_jobs : int or None, default=None
        Processes to train in, by joblib; the result does not depend on it.
    random_state : int, RandomState or None, default=None
        Seeds training, the rows held out and the draws. None differs every time.
        The global generators are never touched.
    verbose : int, default=0
        Print one line after fitting if positive.

    Attributes
    ----------
    estimators_ : list of skorch nets
        The trained networks.
    estimator_ : skorch net
        The first of them.
    classes_ : ndarray of shape (K,)
        Class labels; for a matrix of labels the numbers of its columns.
    n_features_in_ : int
        Number of features (of the second axis), for array input.
    feature_names_in_ : ndarray of str
        Column names, for data frames with string columns.
    n_iter_ : int
        Epochs the network was trained for.

    See Also
    --------
    LaplaceClassifier : A posterior around one network.

    Notes
    -----
    Costs ``n_estimators`` trainings, as many forward passes for each prediction, and
    as many networks of memory. Variances are those between the networks, divided by
    their number less one.

    References
    ----------
    Lakshminarayanan, Pritzel and Blundell (2017), "Simple and scalable predictive
    uncertainty estimation using deep ensembles". Adversarial training, a part of it, is
    left out.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklaplace import DeepEnsembleClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = DeepEnsembleClassifier(random_state=0).fit(X, y)
    >>> model.predict_proba(X[:2]).shape
    (2, 3)
    """

    def __init__(
        self,
        estimator: Any = None,
        *,
        likelihood: Any = None,
        n_estimators: int = 5,
        class_weight: dict[Any, float] | str | None = None,
        dirichlet_approx: str = "projection",
        batch_size: int | None = None,
        n_jobs: int | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.estimator = estimator
        self.likelihood = likelihood
        self.n_estimators = n_estimators
        self.class_weight = class_weight
        self.dirichlet_approx = dirichlet_approx
        self.batch_size = batch_size
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    def _check_parameters(self) -> None:
        super()._check_parameters()
        self._check_dirichlet()


class DeepEnsembleRegressor(NoiseFromRows, BaseEnsemble):
    """Predictions with bands from networks that start from other weights.

    The usual yardstick for uncertainty of networks, at several times the cost. With
    `sklaplace.likelihoods.HeteroscedasticNLLLoss` networks learn the noise by input, as
    in the paper.

    Parameters
    ----------
    estimator : skorch net or None, default=None
        The network; as many clones of it as ``n_estimators`` are trained, each from an
        initialisation of its own. None makes a small network that suits tables.
    likelihood : object or None, default=None
        Of the targets given the outputs, where the criterion is none of those that are
        known; see `sklaplace.likelihoods`. None takes that of the criterion.
    n_estimators : int, default=5
        Number of networks; one is the plain network.
    sigma_noise : float, array or "auto", default="auto"
        Standard deviation of the observation noise, one for all outputs; only for nets
        with ``MSELoss``, whose criterion leaves it open. An array has one for each
        column of ``y``. ``"auto"`` takes the one under which held-out targets are most
        probable: those of ``y_val``, else of the net's ``train_split``, else of
        ``validation_fraction``, else, where rows are few or the net is frozen, the
        training targets.
    validation_fraction : float, default=0.2
        Share of rows to hold out for the noise, from a net that is trained here and
        holds nothing out itself, if there are at least 50 distinct rows.
    batch_size : int or None, default=None
        Rows per batch for prediction; None fits them into a fixed memory budget.
        Results do not depend on it. The net has its own for training.
    n_jobs : int or None, default=None
        Processes to train in, by joblib; the result does not depend on it.
    random_state : int, RandomState or None, default=None
        Seeds training, the rows held out and the draws. None differs every time.
        The global generators are never touched.
    verbose : int, default=0
        Print one line after fitting if positive.

    Attributes
    ----------
    estimators_ : list of skorch nets
        The trained networks.
    estimator_ : skorch net
        The first of them.
    sigma_noise_ : float or ndarray of shape (n_outputs,)
        Standard deviation of the observation noise in use; one where there is none.
    sigma_scaling_ : ndarray of shape (n_outputs,)
        Factors of standard deviations, one each unless `recalibrate` was called.
    n_features_in_ : int
        Number of features (of the second axis), for array input.
    feature_names_in_ : ndarray of str
        Column names, for data frames with string columns.
    n_iter_ : int
        Epochs the network was trained for.

    See Also
    --------
    LaplaceRegressor : A posterior around one network.

    Notes
    -----
    Costs ``n_estimators`` trainings, as many forward passes for each prediction, and
    as many networks of memory. Variances are those between the networks, divided by
    their number less one.

    References
    ----------
    Lakshminarayanan, Pritzel and Blundell (2017), "Simple and scalable predictive
    uncertainty estimation using deep ensembles". Adversarial training, a part of it, is
    left out.

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

    def __init__(
        self,
        estimator: Any = None,
        *,
        likelihood: Any = None,
        n_estimators: int = 5,
        sigma_noise: Any = "auto",
        validation_fraction: float = 0.2,
        batch_size: int | None = None,
        n_jobs: int | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.estimator = estimator
        self.likelihood = likelihood
        self.n_estimators = n_estimators
        self.sigma_noise = sigma_noise
        self.validation_fraction = validation_fraction
        self.batch_size = batch_size
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

"""NetworkFitter: the part of the estimators that takes rows and trains the network.

Rows are checked and cast, some may be held out, the network is trained unless it is
frozen, and what it means is read from a few rows, before and after the training.
"""

import os
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from sklearn.base import clone
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    validate_data,
)

from sklaplace.core.checks import listed
from sklaplace.estimators.outputs import OutputPredictor, TrainedNetwork
from sklaplace.estimators.settings import check_common, inner_net, is_frozen, sibling
from sklaplace.likelihoods import Likelihood
from sklaplace.networks import split
from sklaplace.networks.data import (
    TrainingData,
    check_length,
    first_rows,
    is_opaque,
)
from sklaplace.networks.inputs import InputType, input_type
from sklaplace.networks.outputs import (
    OutputSpec,
    as_forward,
    infer_output_spec,
    raw_outputs,
    warn_if_double_softmax,
)
from sklaplace.networks.training import copied, train


@contextmanager
def unchanged_on_error(estimator: Any) -> Iterator[None]:
    """Put the estimator's attributes back if anything raises."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise


class NetworkFitter(OutputPredictor):
    """Rows and settings in, a `TrainedNetwork` out; not for direct use."""

    _likelihoods: tuple[type, ...]
    _target_options: ClassVar[dict[str, Any]]
    estimator: Any
    likelihood: Any = None
    random_state: Any
    validation_fraction: float

    # ------------------------------------------------------------------ settings
    def _check_parameters(self) -> None:
        """Refuse settings that cannot be right whatever the data."""
        check_common(self)
        self._check_draws()

    def _is_frozen(self) -> bool:
        return is_frozen(self.estimator)

    def _net(self) -> Any:
        return inner_net(self.estimator)

    def _fresh_random_state(self) -> np.random.RandomState:
        """Never the global generator: None draws on the operating system."""
        if self.random_state is None:
            return np.random.RandomState(int.from_bytes(os.urandom(4), "little"))
        given: np.random.RandomState = check_random_state(self.random_state)
        return given

    # ------------------------------------------------------------------- the data
    def _check_data(
        self, X: Any, y: Any, sample_weight: Any, X_val: Any, y_val: Any
    ) -> tuple[TrainingData, TrainingData | None]:
        if (X_val is None) != (y_val is None):
            missing = "y_val" if y_val is None else "X_val"
            raise ValueError(
                f"{missing} is missing: rows to tune on need inputs and targets. "
                "Pass both X_val and y_val, or neither."
            )
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is "
                "None. For a torch Dataset, pass its targets as an array."
            )
        self._input_type: InputType = input_type(self._net())
        data = self._weighted(self._checked(X, y, reset=True), sample_weight)
        if X_val is None:
            return data, None
        validation = self._checked(X_val, y_val, reset=False, name="y_val")
        return data, self._weighted(validation, None)

    def _weighted(self, data: TrainingData, sample_weight: Any) -> TrainingData:
        """The rows with weights, if there are any; those of weight zero are dropped."""
        own = self._own_weights(data.y)
        if sample_weight is None:
            return data if own is None else data.weighted(own)
        weights = _check_sample_weight(
            sample_weight,
            np.empty((len(data.y), 1)),
            dtype=np.float64,
            ensure_non_negative=True,
        )
        return data.weighted(weights if own is None else weights * own)

    def _own_weights(self, y: np.ndarray) -> np.ndarray | None:
        """Weights that targets have by themselves, (n,); overridden for labels."""
        return None

    def _checked(self, X: Any, y: Any, *, reset: bool, name: str = "y") -> TrainingData:
        """Validated arrays; datasets and dicts as they are; targets encoded."""
        if is_opaque(X):
            y = np.asarray(y)
            check_length(X, y)
            if reset:  # what an earlier fit on arrays has left
                for name in ("n_features_in_", "feature_names_in_"):
                    self.__dict__.pop(name, None)
        else:
            X, y = self._validated(X, y, reset=reset)
            X = self._input_type.inputs(X)
        return TrainingData(X, self._encode(y, reset=reset, name=name), None)

    def _validated(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        """Rows and targets as scikit-learn's checks leave them."""
        X, y = validate_data(
            self, X, y, reset=reset, dtype=None, allow_nd=True, **self._target_options
        )
        return X, y

    # ---------------------------------------------------------------- the network
    def _fit_network(
        self,
        data: TrainingData,
        validation: TrainingData | None,
        fit_params: dict[str, Any],
    ) -> TrainedNetwork:
        """The trained net, and which rows it has and has not seen."""
        net = self._new_net(data)
        if validation is None and not self._is_frozen() and not net.train_split:
            data, validation = self._hold_out(data)
        if validation is None and (self._is_frozen() or not net.train_split):
            self._require_no_rows()
        seen, held_out = self._learn(net, data, validation, fit_params)
        if validation is not None:
            held_out = validation.dataset(net)
        inspected = self._inspect(net, seen, is_trained=True)
        if self._is_frozen():  # else that was said before the training
            warn_if_double_softmax(net, inspected)
        return TrainedNetwork(net, inspected, seen, held_out)

    @property
    def _stratify(self) -> bool:
        """Whether rows are held out class by class."""
        return False

    def _tunes_on_rows(self) -> bool:
        """Whether anything is chosen on rows that the network does not see."""
        return False

    def _hold_out(self, data: TrainingData) -> tuple[TrainingData, TrainingData | None]:
        """Set rows aside for what is chosen on them, if there are enough."""
        if not self._tunes_on_rows():
            return data, None
        parts = split.hash_split(
            data.X,
            data.y,
            self.validation_fraction,
            self._seed,
            stratify=self._stratify,
        )
        if parts is None:
            return data, None
        return data.take(parts[0]), data.take(parts[1])

    def _require_no_rows(self) -> None:
        """Overridden where there is no going on without held-out rows."""

    def _learn(
        self,
        net: Any,
        data: TrainingData,
        validation: TrainingData | None,
        fit_params: dict[str, Any],
    ) -> tuple[Any, Any]:
        """Rows that a net has learned from, and those that it held out."""
        if not self._is_frozen():
            return self._train(net, data, validation, fit_params)
        if fit_params:
            raise TypeError(
                f"fit got the unknown arguments {listed(fit_params)}. They would "
                "go to the training of the network, but this one is frozen."
            )
        self._check_targets(net, data.y)
        return data.dataset(net), None

    def _new_net(self, data: TrainingData) -> Any:
        if self.estimator is None:
            return self._default_net(data)
        # a copy, so that training the original further cannot outdate the posterior
        return copied(self._net()) if self._is_frozen() else clone(self._net())

    def _train(
        self,
        net: Any,
        data: TrainingData,
        validation: TrainingData | None,
        fit_params: dict[str, Any],
    ) -> tuple[Any, Any]:
        def check(dataset: Any, held_out: Any) -> None:
            self._check_held_out(dataset, held_out)
            self._check_targets(net, data.y)
            _match_targets(net, dataset)
            reading = self._inspect(net, dataset, is_trained=False)
            warn_if_double_softmax(net, reading)
            kept = held_out if validation is None else validation.dataset(net)
            self._begin(net, reading, kept)

        rows = data.X, data.y, data.sample_weight
        seen, held_out = train(net, *rows, check, self._changes(), **fit_params)
        _check_history(net)
        return seen, held_out

    def _begin(self, net: Any, reading: OutputSpec, held_out: Any) -> None:
        """Overridden where a training is got ready for its first step."""

    def _changes(self) -> tuple[type, ...]:
        """Mixins of the net for the time of training."""
        return ()

    def _check_targets(self, net: Any, y: np.ndarray) -> None:
        """Overridden where a criterion does not take all numbers."""

    def _check_held_out(self, dataset: Any, held_out: Any) -> None:
        """Overridden where targets are encoded: a split may bring its own."""

    def _inspect(self, net: Any, dataset: Any, *, is_trained: bool) -> OutputSpec:
        """Read the net's conventions and refuse what does not fit."""
        return infer_output_spec(
            net, first_rows(net, dataset), **self._meaning(is_trained)
        )

    def _meaning(self, is_trained: bool) -> dict[str, Any]:
        """What is known of the outputs beforehand, as `infer_output_spec` takes it."""
        return {
            "allowed": self._likelihoods,
            "n_targets": self._n_outputs(),
            "is_trained": is_trained,
            "likelihood": self.likelihood,
            "adapted": self._adapted,
            "other": sibling(self),
        }

    @abstractmethod
    def _n_outputs(self) -> int:
        """Number of classes or target columns."""

    @abstractmethod
    def _encode(self, y: Any, *, reset: bool, name: str = "y") -> np.ndarray:
        """Targets as the criterion takes them."""

    @abstractmethod
    def _default_net(self, data: TrainingData) -> Any:
        """The network for who has none."""

    def _adapted(self, likelihood: Likelihood) -> Likelihood:
        """Overridden where settings say more of a likelihood than the criterion."""
        return likelihood


def _match_targets(net: Any, dataset: Any) -> None:
    """Give real-valued targets the number of axes that the module's outputs have.

    A criterion would broadcast (n,) against (n, 1) to (n, n), or refuse.
    """
    y = getattr(dataset, "y", None)
    if not isinstance(y, np.ndarray) or y.dtype.kind != "f":
        return
    with as_forward(net).frozen():
        n_axes = raw_outputs(net, first_rows(net, dataset)).ndim
    if n_axes == 1 and y.ndim == 2 and y.shape[1] == 1:
        dataset.y = y.ravel()
    elif n_axes == 2 and y.ndim == 1:
        dataset.y = y.reshape(-1, 1)


def _check_history(net: Any) -> None:
    """Report training that went wrong as such, not as what it leads to."""
    losses = [row["train_loss"] for row in net.history if "train_loss" in row]
    if not losses:
        return
    if not np.isfinite(losses[-1]):
        raise ValueError(
            f"The training of the network has diverged: its loss is {losses[-1]} "
            "after the last epoch. Lower the learning rate or scale the inputs."
        )
    if losses[-1] > 10 * abs(losses[0]) + 1:
        warnings.warn(
            f"The training of the network seems to have diverged: its loss rose from "
            f"{losses[0]:.3g} to {losses[-1]:.3g}. Lower the learning rate or scale "
            "the inputs.",
            UserWarning,
            stacklevel=2,
        )

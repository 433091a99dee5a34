"""ClassTargets: class labels as the network takes them.

Labels of any kind become numbers from zero, rows are weighted by class, and labels
that the criterion ignores weigh nothing.
"""

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.validation import (
    check_array,
    check_consistent_length,
    validate_data,
)
from skorch import NeuralNetBinaryClassifier

from sklaplace.estimators.fitting import NetworkFitter
from sklaplace.estimators.labelling import Labelling, labelling_of
from sklaplace.likelihoods import CRITERIA, Bernoulli, Categorical, Likelihood
from sklaplace.networks.data import TrainingData

# torch's default, which is an ordinary label where nobody has asked for it
_NO_INDEX = -100


class ClassTargets(ClassifierMixin, NetworkFitter):  # type: ignore[misc]
    """The part of classifiers that takes labels; not for direct use."""

    _likelihoods: tuple[type, ...] = (Categorical, Bernoulli)
    _target_options: ClassVar[dict[str, Any]] = {"multi_output": True}
    _labelling: Labelling
    class_weight: Any = None
    classes_: np.ndarray

    def _check_held_out(self, dataset: Any, held_out: Any) -> None:
        """Refuse targets of a split's own that are not numbered as the net's are."""
        while isinstance(held_out, torch.utils.data.Subset):
            held_out = held_out.dataset
        numbered = np.array_equal(self.classes_, np.arange(len(self.classes_)))
        if held_out is not None and held_out is not dataset and not numbered:
            raise ValueError(
                "train_split brings rows with targets of their own, which cannot be "
                f"matched with the labels {self.classes_[:5].tolist()}. Number the "
                "classes from 0, or pass X_val and y_val to fit."
            )

    def _validated(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        if np.asarray(y).ndim <= 2:
            return super()._validated(X, y, reset=reset)
        X = validate_data(self, X, reset=reset, dtype=None, allow_nd=True)
        y = check_array(y, dtype=None, allow_nd=True, input_name="y")
        check_consistent_length(X, y)
        return X, y

    @property
    def _stratify(self) -> bool:
        return self._labelling.is_single

    def _labels(self, y: Any, name: str = "y") -> np.ndarray:
        """Targets as an array, as the labelling wants them."""
        return self._labelling.labels(y, name)

    def _adapted(self, likelihood: Likelihood) -> Likelihood:
        return self._labelling.adapted(likelihood)

    def _asked_likelihood(self) -> Any:
        """The likelihood given, or that of the criterion; None for unknown ones."""
        if self.likelihood is not None:
            return self.likelihood
        return CRITERIA.get(self._criterion(), (None, ""))[0]

    def _criterion(self) -> type:
        """Class of the net's criterion."""
        criterion = getattr(self._net(), "criterion", None)
        return criterion if isinstance(criterion, type) else type(criterion)

    def _encode(self, y: Any, *, reset: bool, name: str = "y") -> np.ndarray:
        """Labels as 0 … K-1, in the dtype that the criterion takes; -1 is ignored."""
        if reset:
            self._labelling = labelling_of(y, self._asked_likelihood())
        labels = self._labels(y, name)
        ignored = self._is_ignored(labels)
        if reset:
            if ignored.all():
                raise ValueError(
                    "All rows have the label that the criterion ignores. Pass some "
                    "with classes."
                )
            self.classes_ = self._classes_of(labels[~ignored])
        unknown = np.setdiff1d(labels[~ignored], self.classes_)
        if len(unknown):
            raise ValueError(
                f"{name} has labels that y in fit does not: {unknown[:5].tolist()}. "
                "Use rows of the classes that the network knows."
            )
        # what the criterion knows it by, where a row has others beside it
        index = _ignore_index(self._net())
        codes = np.full(labels.shape, -1 if index is None else min(index, -1))
        codes[~ignored] = self._labelling.codes(labels[~ignored], self.classes_)
        if reset:
            self._class_weights = self._weights_of_classes(codes[~ignored])
        return codes.astype(self._code_dtype())

    def _is_ignored(self, labels: np.ndarray) -> np.ndarray:
        """Rows that the criterion is told to ignore, (n,)."""
        none = np.zeros(labels.shape, dtype=bool)
        index = _ignore_index(self._net())
        if index is None or labels.dtype.kind not in "iuf":
            return none
        ignored: np.ndarray = labels == index
        return ignored

    def _weights_of_classes(self, codes: np.ndarray) -> np.ndarray | None:
        """``class_weight`` as an array (K,); classes without rows weigh one."""
        if self.class_weight is None:
            return None
        if not self._labelling.is_single:
            raise ValueError(
                f"class_weight={self.class_weight!r} weighs rows by their one label, "
                "and y has several. Use criterion__pos_weight (criterion__weight for "
                "maps), or sample_weight."
            )
        weights = np.ones(len(self.classes_))
        if isinstance(self.class_weight, Mapping):  # also of classes yet to come
            codes = np.arange(len(weights))
        present = np.unique(codes)
        weights[present] = compute_class_weight(
            self.class_weight,
            classes=self.classes_[present],
            y=self.classes_[codes],
        )
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError(
                f"class_weight={self.class_weight!r} has entries that are not finite, "
                "or negative. Choose numbers from 0."
            )
        return weights

    def _own_weights(self, y: np.ndarray) -> np.ndarray | None:
        codes = y.astype(np.int64)
        weights: np.ndarray | None = None
        if self._class_weights is not None:
            weights = np.asarray(self._class_weights[codes])
        known: np.ndarray = (codes >= 0).reshape(len(codes), -1).max(1)
        if known.all():
            return weights
        kept = known.astype(np.float64)
        return kept if weights is None else weights * kept

    def _classes_of(self, y: np.ndarray) -> np.ndarray:
        """Labels that outputs stand for: a frozen net knows its own."""
        found = self._labelling.classes(y)
        announced = getattr(self, "_announced", None)
        if not self._labelling.has_names:
            if announced is not None and not np.array_equal(announced, found):
                raise ValueError(
                    f"classes={announced.tolist()} are not the numbers of the columns "
                    f"of y, {found.tolist()}. Leave classes out."
                )
            return found
        if announced is not None:
            found = announced
        if not self._is_frozen():
            return found
        known = _known_classes(self._net())
        if known is None or known.dtype.kind != found.dtype.kind:
            return found
        known = known[~self._is_ignored(known)]
        return known if np.isin(found, known).all() else found

    def _code_dtype(self) -> type:
        binary = (torch.nn.BCEWithLogitsLoss, torch.nn.BCELoss)
        has_floats = issubclass(self._criterion(), binary)
        return np.float32 if has_floats or not self._labelling.has_names else np.int64

    def _n_outputs(self) -> int:
        return len(self.classes_)

    def _n_options(self) -> int:
        """Classes K among which a label is one."""
        return self._labelling.n_options(self.classes_)

    def _warn_if_guessing(self, loss: float) -> None:
        """Warn of a mean loss, in nats per label, far above that of no network."""
        guessing = np.log(self._n_options())
        if guessing > 0 and loss > 2 * guessing:
            warnings.warn(
                f"The network's training loss, {loss:.3g} nats per label, is larger "
                f"than that of guessing, {guessing:.3g}: its training has diverged or "
                "not begun. Lower the learning rate, scale the inputs or train longer.",
                UserWarning,
                stacklevel=2,
            )

    def _new_net(self, data: TrainingData) -> Any:
        net = super()._new_net(data)
        if not (self._labelling.is_single or self._is_frozen()):
            _check_takes_columns(net)
        return net

    def _default_net(self, data: TrainingData) -> Any:
        return self._labelling.default_net(data, len(self.classes_))


def _check_takes_columns(net: Any) -> None:
    """Refuse a net that skorch itself keeps to one label per row."""
    kind = type(net).__name__
    if isinstance(net, NeuralNetBinaryClassifier):
        raise ValueError(
            f"estimator is a {kind}, which takes one label per row, and y has several. "
            "Use skorch.NeuralNet with criterion=torch.nn.BCEWithLogitsLoss."
        )
    if getattr(net.train_split, "stratified", False):
        raise ValueError(
            f"The train_split of estimator, a {kind}, keeps shares of classes, which "
            "several labels per row do not have. Use skorch.NeuralNet, or "
            "train_split=None."
        )


def _ignore_index(net: Any) -> int | None:
    """Label of rows to ignore, where a net's criterion has been given one."""
    criterion = getattr(net, "criterion", None)
    if isinstance(criterion, torch.nn.Module):
        index = getattr(criterion, "ignore_index", _NO_INDEX)
        return None if index == _NO_INDEX else int(index)
    return vars(net).get("criterion__ignore_index") if net is not None else None


def _known_classes(net: Any) -> np.ndarray | None:
    """Labels that a fitted net was trained on, if it says."""
    try:
        return np.asarray(net.classes_)
    except AttributeError:
        return None

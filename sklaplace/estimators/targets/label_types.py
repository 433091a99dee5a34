"""Target types: the kinds of classification targets, and the shapes of predictions.

A sample has r labels, and each label is one of K classes. Likelihoods use class codes,
and probabilities of shape (n·r, K). A target type converts targets to codes, and
probabilities to the arrays that estimators return:

* ``SingleLabel``: one label of any type per sample, (n,);
* ``MultiLabel``: L labels per sample, each zero or one, (n, L);
* ``DenseLabel``: one label at every position, (n, *positions).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy.sparse import issparse
from sklearn.preprocessing import LabelEncoder
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from skorch import NeuralNet
from torch import Tensor

from sklaplace.core.checks import warn_user
from sklaplace.data.dataset import TrainingData
from sklaplace.likelihoods import ClassificationLikelihood, Likelihood
from sklaplace.networks.default import Size, default_classifier, default_multilabel
from sklaplace.networks.outputs import ONE_CLASS

# Minimum number of rows to suspect one-hot targets, if each row has exactly one label.
# For random labels in two or more columns, the probability of this is at most 1e-3.
ENOUGH_ROWS = 10


class TargetType(ABC):
    """Kind of classification targets. The default methods are for class labels."""

    has_class_names: ClassVar[bool] = True
    """Whether ``classes_`` contains the distinct targets rather than column numbers."""
    is_single: ClassVar[bool] = False
    """Whether samples have one label each, which is required for class weights."""

    @abstractmethod
    def check(self, y: Any, name: str) -> np.ndarray:
        """Return targets as an array; raise an error for targets of another type."""

    @abstractmethod
    def default_net(self, data: TrainingData, size: Size, n_classes: int) -> NeuralNet:
        """Return the default skorch net."""

    def classes(self, labels: np.ndarray) -> np.ndarray:
        """Return ``classes_``, (K,), the sorted distinct labels."""
        return np.asarray(np.unique(labels))

    def encode(self, labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Return class codes, starting from zero, in the shape of the labels."""
        codes: np.ndarray = LabelEncoder().fit(classes).transform(labels.ravel())
        return codes.reshape(labels.shape)

    def n_classes(self, classes: np.ndarray) -> int:
        """Return the number K of classes per label."""
        return len(classes)

    def adapt(self, likelihood: Any) -> Likelihood:
        """Return the likelihood for targets of this type."""
        return likelihood

    def unflatten(self, values: np.ndarray) -> np.ndarray:
        """Reshape values (n·r, k), such as one value per class, to the output shape."""
        return values

    def probabilities(self, values: np.ndarray) -> np.ndarray:
        """Reshape probabilities (n·r, K) to the output of ``predict_proba``."""
        return self.unflatten(values)

    def predict(
        self, proba: np.ndarray, classes: np.ndarray, threshold: float | None
    ) -> np.ndarray:
        """Return the most probable classes, or apply a threshold to two classes.

        With a threshold, the second class needs a larger probability than it. ``proba``
        has the shape (n, K).
        """
        indices = proba.argmax(1)
        if threshold is not None and proba.shape[1] == 2:
            indices = (proba[:, 1] > threshold).astype(int)
        return np.asarray(classes[indices])

    def latent_moments(
        self, likelihood: ClassificationLikelihood, mean: Tensor, cov: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the logits' means and (co)variances in the estimator's format."""
        return likelihood.class_logits(mean, cov)


@dataclass(frozen=True)
class SingleLabel(TargetType):
    """One label of any type per sample."""

    is_single = True

    def check(self, y: Any, name: str) -> np.ndarray:
        """Return labels (n,)."""
        return column_or_1d(y, warn=True)

    def default_net(self, data: TrainingData, size: Size, n_classes: int) -> NeuralNet:
        """Return a classifier with a softmax; raise ValueError for a single class."""
        if n_classes == 1:
            raise ValueError(f"y has 1 class. {ONE_CLASS}")
        return default_classifier(data, size, n_classes)


@dataclass(frozen=True)
class MultiLabel(TargetType):
    """Several labels per sample, in columns of zeros and ones.

    Attributes
    ----------
    n_labels : int
        Number L of labels.
    """

    n_labels: int
    has_class_names = False

    def check(self, y: Any, name: str) -> np.ndarray:
        """Return 0/1 labels, (n, L); raise ValueError for others.

        ``name`` is that of ``y`` in messages.
        """
        labels = y.toarray() if issparse(y) else np.asarray(y)
        if labels.ndim != 2 or labels.shape[1] != self.n_labels:
            raise ValueError(
                f"{name} has shape {labels.shape}, but y in fit has {self.n_labels} "
                "columns. Pass one column per label."
            )
        if len(invalid := np.setdiff1d(labels, [0, 1])):
            raise ValueError(
                f"{name} has {self.n_labels} columns with entries such as "
                f"{invalid[:5].tolist()}. Pass columns that are 0 or 1 "
                "(sklearn.preprocessing.MultiLabelBinarizer), or one column of labels."
            )
        return labels

    def classes(self, labels: np.ndarray) -> np.ndarray:
        """Return column numbers, (L,)."""
        return np.arange(self.n_labels)

    def encode(self, labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Return the labels as integers."""
        return labels.astype(np.int64)

    def n_classes(self, classes: np.ndarray) -> int:
        """Return 2, the number of classes per label."""
        return 2

    def adapt(self, likelihood: Any) -> Likelihood:
        """Return the likelihood with one logit per label."""
        return likelihood.multilabel()

    def unflatten(self, values: np.ndarray) -> np.ndarray:
        """Return values in shape (n, L, k)."""
        return values.reshape(-1, self.n_labels, values.shape[-1])

    def probabilities(self, values: np.ndarray) -> np.ndarray:
        """Return the probability that each label is one, (n, L)."""
        return self.unflatten(values)[..., 1]

    def predict(
        self, proba: np.ndarray, classes: np.ndarray, threshold: float | None
    ) -> np.ndarray:
        """Return 0/1 labels, (n, L)."""
        return (proba > 0.5).astype(np.int64)

    def latent_moments(
        self, likelihood: ClassificationLikelihood, mean: Tensor, cov: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the moments of the outputs, which are one logit per label."""
        return mean, cov

    def default_net(self, data: TrainingData, size: Size, n_classes: int) -> NeuralNet:
        """Return a classifier with one sigmoid per label.

        Warn if the targets look one-hot encoded.
        """
        if len(data.y) >= ENOUGH_ROWS and (data.y.sum(axis=1) == 1).all():
            warn_user(
                f"y has {self.n_labels} columns with a single 1 in each row. Columns "
                "are separate labels, whose probabilities do not add up to one. If y "
                "is one-hot, pass y.argmax(axis=1)."
            )
        return default_multilabel(data, size)


@dataclass(frozen=True)
class DenseLabel(TargetType):
    """One label of any type at every position of a sample, for example at each pixel.

    Attributes
    ----------
    positions : tuple of int
        Shape of the targets of one sample.
    """

    positions: tuple[int, ...]

    def check(self, y: Any, name: str) -> np.ndarray:
        """Return labels (n, *positions); raise ValueError for others.

        ``name`` is that of ``y`` in messages.
        """
        labels = np.asarray(y)
        if labels.shape[1:] != self.positions:
            raise ValueError(
                f"{name} has shape {labels.shape}, but y in fit has labels at "
                f"positions {self.positions}. Pass labels of that shape."
            )
        if labels.dtype.kind == "f" and (labels != np.round(labels)).any():
            raise ValueError(
                f"{name} has entries that are not whole numbers, at positions "
                f"{self.positions}. Pass a label for each position, or a 1d array y."
            )
        return labels

    def adapt(self, likelihood: Any) -> Likelihood:
        """Return the likelihood with K logits at every position."""
        return likelihood.dense(self.positions)

    def _positions_last(self, values: Any, n_axes: int) -> Any:
        """Move positions from the first axis to behind the ``n_axes`` class axes.

        The first axis has one entry per sample and position, in this order.
        """
        shape = values.shape[-n_axes:]  # (K,), or (K, K) for covariances
        # (n, r, K) or (n, r, K, K) for r positions
        rows = values.reshape(-1, math.prod(self.positions), *shape)
        # arrays have no ``movedim``, but only one class axis
        moved = rows.swapaxes(1, 2) if n_axes == 1 else rows.movedim(1, -1)
        return moved.reshape(len(rows), *shape, *self.positions)

    def unflatten(self, values: np.ndarray) -> np.ndarray:
        """Return values in shape (n, K, *positions)."""
        return self._positions_last(values, 1)

    def latent_moments(
        self, likelihood: ClassificationLikelihood, mean: Tensor, cov: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return arrays (n, K, *positions); covariances are (n, K, K, *positions)."""
        logits, cov = likelihood.class_logits(mean, cov)
        return self._positions_last(logits, 1), self._positions_last(cov, cov.ndim - 1)

    def default_net(self, data: TrainingData, size: Size, n_classes: int) -> NeuralNet:
        """Raise ValueError, because there is no default net for dense labels."""
        raise ValueError("estimator=None does not support maps. Pass a skorch net.")


def infer_target_type(y: Any, likelihood: Any) -> TargetType:
    """Infer the target type from the shape of the targets and the likelihood.

    Parameters
    ----------
    y : array-like of shape (n,), (n, 1) or (n, ...)
        Targets.
    likelihood : ClassificationLikelihood or None
        Likelihood from the constructor or the criterion, or None if unknown.

    Returns
    -------
    TargetType
        `SingleLabel` for one column. Otherwise, the likelihood decides between
        `DenseLabel` and, also if it is unknown, `MultiLabel`.

    Raises
    ------
    ValueError
        If ``y`` has several labels per sample, or more than two axes, and the
        likelihood does not support such targets.
    """
    shape = y.shape[1:] if issparse(y) else np.shape(y)[1:]  # of one sample's targets
    if shape in ((), (1,)):
        check_classification_targets(y)  # raises for real numbers
        return SingleLabel()
    multi_target = getattr(likelihood, "multi_target", "multilabel")
    if multi_target == "dense":
        return DenseLabel(shape)
    if multi_target != "multilabel":
        # called for its error, which suggests another likelihood
        likelihood.multilabel()
    if len(shape) > 1:
        raise ValueError(
            f"y has shape {(len(y), *shape)}. Pass one label per row, (n,), or a "
            "matrix of labels that are 0 or 1, (n, n_labels). For a class at every "
            "position, use criterion=torch.nn.CrossEntropyLoss."
        )
    return MultiLabel(*shape)

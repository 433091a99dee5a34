"""Labellings: what the targets of a classifier are, and the shape of its answers.

A row has r labels, each of one of K classes. Everything below knows numbers of classes
and probabilities (n·r, K) alone; how targets become the one and the other becomes
answers is said here, once for each kind of targets:

* ``OneLabel``: one label of any type per row, (n,);
* ``LabelMatrix``: L labels that are zero or one, (n, L);
* ``LabelMap``: one label at every position, (n, *positions).
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
from torch import Tensor

from sklaplace.likelihoods import ClassificationLikelihood, Likelihood
from sklaplace.networks.data import TrainingData
from sklaplace.networks.default import default_classifier, default_multilabel


class Labelling(ABC):
    """One kind of targets."""

    has_names: ClassVar[bool]
    """Whether classes are whatever the targets name."""
    is_single: ClassVar[bool] = False
    """Whether a row has one label, by which rows are weighted and sorted."""

    @abstractmethod
    def labels(self, y: Any, name: str) -> np.ndarray:
        """Targets as an array; refuses those of another kind."""

    @abstractmethod
    def classes(self, labels: np.ndarray) -> np.ndarray:
        """What ``classes_`` is."""

    @abstractmethod
    def codes(self, labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Numbers from zero of known labels, in their shape."""

    @abstractmethod
    def n_options(self, classes: np.ndarray) -> int:
        """Classes K among which a label is one."""

    @abstractmethod
    def adapted(self, likelihood: Any) -> Likelihood:
        """The likelihood for targets of this kind."""

    @abstractmethod
    def by_class(self, values: np.ndarray) -> np.ndarray:
        """Values (n·r, k), such as of k classes, as they are handed out."""

    @abstractmethod
    def probabilities(self, values: np.ndarray) -> np.ndarray:
        """Probabilities (n·r, K) as they are handed out."""

    @abstractmethod
    def decided(
        self, proba: np.ndarray, classes: np.ndarray, threshold: float | None
    ) -> np.ndarray:
        """Targets from `probabilities`; a threshold is of one label, of two classes."""

    @abstractmethod
    def latent(
        self, likelihood: ClassificationLikelihood, mean: Tensor, cov: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gaussian over logits as it is handed out, with variances or covariances."""

    @abstractmethod
    def default_net(self, data: TrainingData, n_classes: int) -> Any:
        """The network for who has none."""


@dataclass(frozen=True)
class OneLabel(Labelling):
    """One label of any type per row."""

    has_names = True
    is_single = True

    def labels(self, y: Any, name: str) -> np.ndarray:
        """Labels, (n,)."""
        labels: np.ndarray = column_or_1d(y, warn=True)
        return labels

    def classes(self, labels: np.ndarray) -> np.ndarray:
        """Those that occur, (K,), sorted."""
        found: np.ndarray = np.unique(labels)
        return found

    def codes(self, labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Places of labels in ``classes``."""
        encoder = LabelEncoder().fit(classes)
        codes: np.ndarray = encoder.transform(labels.ravel())
        return codes.reshape(labels.shape)

    def n_options(self, classes: np.ndarray) -> int:
        """One for each class."""
        return len(classes)

    def adapted(self, likelihood: Any) -> Likelihood:
        """As it is."""
        known: Likelihood = likelihood
        return known

    def by_class(self, values: np.ndarray) -> np.ndarray:
        """(n, K)."""
        return values

    def probabilities(self, values: np.ndarray) -> np.ndarray:
        """(n, K)."""
        return values

    def decided(
        self, proba: np.ndarray, classes: np.ndarray, threshold: float | None
    ) -> np.ndarray:
        """The most probable class, (n,), or the second if above the threshold."""
        places = proba.argmax(1)
        if threshold is not None and proba.shape[1] == 2:
            places = (proba[:, 1] > threshold).astype(int)
        chosen: np.ndarray = classes[places]
        return chosen

    def latent(
        self, likelihood: ClassificationLikelihood, mean: Tensor, cov: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One logit per class."""
        return likelihood.class_logits(mean, cov)

    def default_net(self, data: TrainingData, n_classes: int) -> Any:
        """With a softmax."""
        return default_classifier(data.X, data.y, data.sample_weight, n_classes)


@dataclass(frozen=True)
class LabelMatrix(Labelling):
    """Several labels per row, in columns, each zero or one.

    Attributes
    ----------
    n_labels : int
        L.
    """

    n_labels: int
    has_names = False

    def labels(self, y: Any, name: str) -> np.ndarray:
        """Zeros and ones, (n, L)."""
        labels = y.toarray() if issparse(y) else np.asarray(y)
        if labels.ndim != 2 or labels.shape[1] != self.n_labels:
            raise ValueError(
                f"{name} has shape {labels.shape}, but y in fit has {self.n_labels} "
                "columns. Pass one column for each of these labels."
            )
        strange = np.setdiff1d(labels, [0, 1])
        if len(strange):
            raise ValueError(
                f"{name} has {self.n_labels} columns with entries such as "
                f"{strange[:5].tolist()}. Several labels per row are 0 or 1 each "
                "(sklearn.preprocessing.MultiLabelBinarizer makes them so); for one "
                "label per row pass one column."
            )
        return labels

    def classes(self, labels: np.ndarray) -> np.ndarray:
        """Numbers of the columns, (L,)."""
        return np.arange(self.n_labels)

    def codes(self, labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """The labels themselves."""
        return labels.astype(np.int64)

    def n_options(self, classes: np.ndarray) -> int:
        """Zero and one."""
        return 2

    def adapted(self, likelihood: Any) -> Likelihood:
        """One logit per label."""
        adapted: Likelihood = likelihood.multilabel()
        return adapted

    def by_class(self, values: np.ndarray) -> np.ndarray:
        """(n, L, 2), or (n, L, k) of k values."""
        return values.reshape(-1, self.n_labels, values.shape[-1])

    def probabilities(self, values: np.ndarray) -> np.ndarray:
        """Of labels being one, (n, L)."""
        return self.by_class(values)[..., 1]

    def decided(
        self, proba: np.ndarray, classes: np.ndarray, threshold: float | None
    ) -> np.ndarray:
        """Zeros and ones, (n, L)."""
        return (proba > 0.5).astype(np.int64)

    def latent(
        self, likelihood: ClassificationLikelihood, mean: Tensor, cov: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One logit per label: the outputs themselves."""
        return mean, cov

    def default_net(self, data: TrainingData, n_classes: int) -> Any:
        """With one sigmoid per label."""
        return default_multilabel(data.X, data.y, data.sample_weight)


@dataclass(frozen=True)
class LabelMap(OneLabel):
    """One label of any type at every position of a row.

    Attributes
    ----------
    positions : tuple of int
        Shape of a map.
    """

    positions: tuple[int, ...]
    is_single = False

    def labels(self, y: Any, name: str) -> np.ndarray:
        """Labels, (n, *positions)."""
        labels = np.asarray(y)
        if labels.shape[1:] != self.positions:
            raise ValueError(
                f"{name} has shape {labels.shape}, but y in fit has labels at "
                f"positions {self.positions}. Pass maps of that shape."
            )
        if labels.dtype.kind == "f" and (labels != np.round(labels)).any():
            raise ValueError(
                f"{name} has entries that are not whole numbers, at positions "
                f"{self.positions}. Pass a label for each position, or 1d array y."
            )
        return labels

    def adapted(self, likelihood: Any) -> Likelihood:
        """K logits at every position."""
        adapted: Likelihood = likelihood.dense(self.positions)
        return adapted

    def _mapped(self, values: Any, n_axes: int) -> Any:
        """Positions, which come first, behind ``n_axes`` axes of classes."""
        shape = values.shape[-n_axes:]
        rows = values.reshape(-1, math.prod(self.positions), *shape)
        behind = rows.swapaxes(1, 2) if n_axes == 1 else rows.movedim(1, -1)
        return behind.reshape(len(rows), *shape, *self.positions)

    def by_class(self, values: np.ndarray) -> np.ndarray:
        """(n, K, *positions)."""
        mapped: np.ndarray = self._mapped(values, 1)
        return mapped

    def probabilities(self, values: np.ndarray) -> np.ndarray:
        """(n, K, *positions)."""
        return self.by_class(values)

    def latent(
        self, likelihood: ClassificationLikelihood, mean: Tensor, cov: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(n, K, *positions), and (n, K, K, *positions) of covariances."""
        logits, spread = likelihood.class_logits(mean, cov)
        return self._mapped(logits, 1), self._mapped(spread, spread.ndim - 1)

    def default_net(self, data: TrainingData, n_classes: int) -> Any:
        """There is none."""
        raise ValueError("estimator=None has no network for maps. Pass a skorch net.")


# what several columns of targets are, by `ClassificationLikelihood.multi_target`
LABELLINGS: dict[str, Any] = {
    "multilabel": lambda shape: LabelMatrix(*shape),
    "dense": LabelMap,
}


def labelling_of(y: Any, likelihood: Any) -> Labelling:
    """What targets are, by their shape and the likelihood asked for.

    Parameters
    ----------
    y : array-like of shape (n,), (n, 1) or (n, ...)
        Targets.
    likelihood : ClassificationLikelihood or None
        That of the criterion, or given; None where nothing is known of it.

    Raises
    ------
    ValueError
        If the likelihood has no place for several labels per row, or y has more axes
        than it knows of.
    """
    shape = y.shape[1:] if issparse(y) else np.shape(y)[1:]
    if shape in ((), (1,)):
        check_classification_targets(y)
        return OneLabel()
    kind = getattr(likelihood, "multi_target", "multilabel")
    if kind not in LABELLINGS:
        likelihood.multilabel()  # says what would know them
    if kind == "multilabel" and len(shape) > 1:
        raise ValueError(
            f"y has shape {(len(y), *shape)}. Pass one label per row, (n,), or a "
            "matrix of labels that are 0 or 1, (n, n_labels)."
        )
    labelling: Labelling = LABELLINGS[kind](shape)
    return labelling

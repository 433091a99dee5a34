"""ClassTargets: class labels, encoded for the criterion of the network.

Labels of any type are encoded as whole numbers from zero. Samples can be weighted by
class. Labels that the criterion ignores have zero weight.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.sparse import issparse
from scipy.special import entr
from sklearn.metrics import accuracy_score
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.validation import check_consistent_length
from skorch import NeuralNet, NeuralNetBinaryClassifier
from torch import Tensor

from sklaplace.core.checks import naming
from sklaplace.data.arrays import as_labels
from sklaplace.data.dataset import TrainingData
from sklaplace.estimators.targets.base import (
    Targets,
    criterion_of,
    likelihood_of,
)
from sklaplace.estimators.targets.label_types import TargetType, infer_target_type
from sklaplace.estimators.targets.numbers import LARGEST_UNIT, NOTABLE_LOSS
from sklaplace.likelihoods import Bernoulli, Categorical, Likelihood
from sklaplace.networks.default import Size
from sklaplace.networks.outputs import unwrapped

# class weights
Weights = Mapping[object, float] | str | None

# torch's default ``ignore_index``; a criterion does not show whether it was set
_DEFAULT_INDEX = -100


@dataclass(frozen=True)
class ClassTargets(Targets):
    """Classes of the training targets, with their codes.

    Attributes
    ----------
    target_type : TargetType
        Type for one label per sample, several labels, or one label per position.
    net : skorch.NeuralNet or None
        Net passed to the constructor. None means the default network.
    classes : ndarray of shape (K,)
        The value of ``classes_``.
    are_of_labels : bool
        Whether the classes were inferred from the targets rather than passed.
    class_weights : ndarray of shape (K,) or None
        Weight of each class.
    """

    target_type: TargetType
    net: NeuralNet
    classes: np.ndarray
    are_of_labels: bool = True
    class_weights: np.ndarray | None = None

    likelihoods: ClassVar[tuple[type, ...]] = (Categorical, Bernoulli)
    example_net = "skorch.NeuralNetClassifier({}, criterion=torch.nn.CrossEntropyLoss)"

    @classmethod
    def infer(
        cls,
        y: ArrayLike,
        net: NeuralNet,
        likelihood: Any = None,
        class_weight: Weights = None,
        *,
        is_frozen: bool = False,
        classes: np.ndarray | None = None,
    ) -> "ClassTargets":
        """Infer the classes of the training targets.

        Parameters
        ----------
        y : array-like
            Training targets.
        net : skorch.NeuralNet or None
            Net whose criterion determines the supported targets. None means the default
            network.
        likelihood : ClassificationLikelihood or None
            Likelihood that overrides the criterion's likelihood.
        class_weight : dict, "balanced" or None
            Class weights.
        is_frozen : bool
            Whether to use the classes that the net was trained on, if they are known.
            These classes take precedence.
        classes : ndarray, optional
            All classes, including classes that do not occur in ``y``.

        Returns
        -------
        ClassTargets
            The classes of a frozen net, else those that were passed, else those in
            ``y``. For a matrix of labels, the classes are the numbers of its columns.

        Raises
        ------
        ValueError
            If the targets are not labels of a single type, or if all labels are
            ignored.
        """
        # only a matrix of 0/1 labels can be sparse, and its type makes it dense
        y = y if issparse(y) else as_labels(y, "y")
        target_type = infer_target_type(y, likelihood or likelihood_of(net))
        labels = target_type.check(y, "y")
        ignored = is_ignored(labels, net, classes)
        if ignored.all():
            raise ValueError(
                "All rows have the label that the criterion ignores. Pass some rows "
                "with other labels."
            )
        observed = target_type.classes(labels[~ignored])
        # the classes of a matrix of labels are its column indices
        if not target_type.has_class_names and classes is not None:
            if not np.array_equal(classes, observed):
                raise ValueError(
                    f"classes={classes.tolist()} does not match the column indices "
                    f"of y, {observed.tolist()}. Leave classes out."
                )
            classes = None  # they equal the observed ones
        # a trained net can know more classes than y has, in the order of its outputs
        if is_frozen and target_type.has_class_names:
            net_classes = _classes_of_net(net, observed if classes is None else classes)
            classes = classes if net_classes is None else net_classes
        # whether the classes come from the labels in y, and not from another source
        are_of_labels = classes is None and target_type.has_class_names
        all_classes = observed if classes is None else classes
        targets = cls(target_type, net, all_classes, are_of_labels)
        return targets.weighted(y, class_weight)

    def weighted(self, y: ArrayLike, class_weight: Weights) -> "ClassTargets":
        """Return a copy with class weights; classes without samples have weight one.

        A code is the index of a class. scikit-learn computes the weights, from a dict
        or from the class frequencies.
        """
        if class_weight is None:
            return self
        if not self.target_type.is_single:
            raise ValueError(
                f"class_weight={class_weight!r} needs one label per row. Use "
                "criterion__pos_weight (criterion__weight for maps), or sample_weight."
            )
        codes = self.encode(y).astype(np.int64)
        codes = codes[codes >= 0]  # negative codes belong to ignored labels
        weights = np.ones(len(self.classes))
        # a dict also weights classes without samples: pretend that each class has one
        # sample, on whose number its weight does not depend
        if isinstance(class_weight, Mapping):
            codes = np.arange(len(weights))
        present = np.unique(codes)
        with naming(class_weight="class_weight"):
            weights[present] = compute_class_weight(
                class_weight, classes=self.classes[present], y=self.classes[codes]
            )
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError(
                f"class_weight={class_weight!r} has negative or non-finite entries. "
                "Class weights must be finite and non-negative."
            )
        return replace(self, class_weights=weights)

    # ------------------------------------------------------------------- encoding
    def check(self, y: ArrayLike, name: str = "y") -> np.ndarray:
        """Return targets as an array; raise an error for targets of another type."""
        labels = y if issparse(y) else as_labels(y, name)
        return self.target_type.check(labels, name)

    def is_ignored(self, labels: np.ndarray) -> np.ndarray:
        """Return a mask of ignored labels, with the shape of the labels."""
        return is_ignored(labels, self.net, self.classes)

    def accuracy(
        self, y: ArrayLike, predicted: np.ndarray, sample_weight: ArrayLike | None
    ) -> float:
        """Return the weighted accuracy on labels that are not ignored.

        A row of a matrix of labels counts as correct if all its labels are. A sample
        with labels at several positions counts once per position.
        """
        labels = self.check(y)
        check_consistent_length(predicted, labels, sample_weight)
        is_scored = ~self.is_ignored(labels)
        if not self.target_type.has_class_names:
            # `accuracy_score` compares whole rows of a matrix, if dtypes are equal; the
            # first column tells whether a row is scored
            labels, is_scored = labels.astype(predicted.dtype), is_scored[:, 0]
        if not is_scored.any():
            raise ValueError(
                "The criterion ignores all labels of y. Pass some rows with classes."
            )
        weights = None
        if sample_weight is not None:
            # each position has the weight of its sample
            column = np.asarray(sample_weight).reshape(-1, *[1] * (is_scored.ndim - 1))
            weights = np.broadcast_to(column, is_scored.shape)[is_scored]
        accuracy = accuracy_score(
            labels[is_scored], predicted[is_scored], sample_weight=weights
        )
        return float(accuracy)

    def log_proba_of(self, y: ArrayLike, proba: np.ndarray) -> np.ndarray:
        """Return the finite log-probability of each sample's labels, (n,).

        ``proba`` has the shape (n·r, K) for r labels per sample and K classes. The
        log-probabilities of a sample's labels are added. Ignored labels do not count.
        """
        labels = self.check(y)
        is_scored = ~self.is_ignored(labels)
        codes = self.target_type.encode(labels[is_scored], self.classes)
        chosen = proba[is_scored.ravel()][np.arange(len(codes)), codes.ravel()]
        # ignored labels keep a zero; the smallest normal number avoids log(0)
        scores = np.zeros(labels.shape)
        scores[is_scored] = np.log(np.maximum(chosen, np.finfo(np.float64).tiny))
        return scores.reshape(len(labels), -1).sum(1)

    def encode(self, y: ArrayLike, name: str = "y") -> np.ndarray:
        """Return codes 0 … K-1 in the criterion's dtype, or negative if ignored."""
        labels = self.check(y, name)
        ignored = self.is_ignored(labels)
        unknown = np.setdiff1d(labels[~ignored], self.classes)
        if len(unknown):
            raise ValueError(
                f"{name} has labels that y in fit does not have: "
                f"{unknown[:5].tolist()}. Pass only rows with classes from fit."
            )
        # the code of ignored labels is the index that the criterion ignores. It must be
        # negative, because other codes are classes: `match` replaces others by -1
        index = _ignore_index(self.net)
        codes = np.full(labels.shape, -1 if index is None else min(index, -1))
        codes[~ignored] = self.target_type.encode(labels[~ignored], self.classes)
        return codes.astype(self.dtype)

    @property
    def dtype(self) -> type:
        """Dtype of codes that the criterion expects."""
        binary = (torch.nn.BCEWithLogitsLoss, torch.nn.BCELoss)
        has_names = self.target_type.has_class_names
        is_real = not has_names or issubclass(criterion_of(self.net), binary)
        return np.float32 if is_real else np.int64

    def sample_weight(self, codes: np.ndarray) -> np.ndarray | None:
        """Return weights (n,) by class, zero if all labels are ignored, or None.

        None means that all weights are one. Negative codes belong to ignored labels.
        """
        codes = codes.astype(np.int64)
        weights = self.class_weights
        weights = None if weights is None else weights[codes.clip(min=0)]
        has_label: np.ndarray = (codes >= 0).reshape(len(codes), -1).max(1)
        if has_label.all():
            return weights
        return has_label.astype(np.float64) if weights is None else weights * has_label

    def notable_loss(self, data: TrainingData) -> float:
        """Return the training loss (nats per label) above which a net learned nothing.

        If X is an array of numbers far from unit size, this is the loss of predicting
        the class frequencies. Otherwise, it is twice the loss of equal probabilities,
        because equal probabilities can be the best prediction of noisy labels. The
        default network (None) scales X.
        """
        X, codes = data.X, data.y.reshape(len(data.y), -1).astype(np.int64)
        has_size = isinstance(X, np.ndarray) and X.dtype.kind == "f"
        is_raw = has_size and self.net is not None
        # root mean square of the inputs, or one if it does not matter
        size = np.linalg.norm(X.ravel()) / X.size**0.5 if is_raw else 1.0
        if 1 / LARGEST_UNIT <= size <= LARGEST_UNIT:
            # with a single class, the loss is zero, and no loss is notable
            return float(2 * np.log(self.n_classes)) or np.inf
        weights = 1 if data.sample_weight is None else data.sample_weight[:, None]
        weights = weights * (codes >= 0)  # negative codes belong to ignored labels
        # one column of all labels, or one column per label of a matrix
        shape = (-1, 1) if self.target_type.has_class_names else codes.shape
        codes, weights = codes.reshape(shape), weights.reshape(shape)
        classes = range(self.n_classes)
        # the entropy of the class frequencies, averaged over columns
        shares = [np.average(codes == k, axis=0, weights=weights) for k in classes]
        # a little less, because a loss above the entropy is that of guessing; again, no
        # zero loss is notable
        return NOTABLE_LOSS * float(entr(shares).sum(0).mean()) or np.inf

    def missing_classes(self, labels: np.ndarray) -> np.ndarray:
        """Return the classes that are missing from a part of the training targets.

        There are none if the classes were not inferred from the targets, because other
        sources may list classes without samples.
        """
        if not self.are_of_labels:
            return self.classes[:0]
        classes = self.target_type.classes(labels[~self.is_ignored(labels)])
        return np.setdiff1d(self.classes, classes)

    # ----------------------------------------------------------------- the network
    @property
    def n_outputs(self) -> int:
        """Number of classes, or number of label columns."""
        return len(self.classes)

    @property
    def n_classes(self) -> int:
        """Number K of classes per label."""
        return self.target_type.n_classes(self.classes)

    @property
    def stratify(self) -> bool:  # type: ignore[override]
        """Whether held-out samples are stratified by class."""
        return self.target_type.is_single

    def adapt(self, likelihood: Likelihood) -> Likelihood:
        """Return the likelihood for targets of this type."""
        return self.target_type.adapt(likelihood)

    def default_net(self, data: TrainingData, size: Size) -> NeuralNet:
        """Return the default skorch net."""
        return self.target_type.default_net(data, size, self.n_outputs)

    def match(self, net: NeuralNet, y: np.ndarray) -> None:
        """Make the criterion of a copied net ignore the code of ignored labels.

        Raise an error for class weights that the criterion cannot apply.
        """
        criterion: Any = unwrapped(net.criterion_)
        # replace an index that is not negative, which could equal the code of a class
        if getattr(criterion, "ignore_index", -1) >= 0:
            criterion.ignore_index = -1  # the code of ignored labels
        weight = getattr(criterion, "weight", None)
        # the weights of other criteria (of labels or samples) do not belong to classes
        with_class_weights = torch.nn.CrossEntropyLoss, torch.nn.NLLLoss
        if weight is None or not isinstance(criterion, with_class_weights):
            return
        if weight.shape != (self.n_outputs,):
            raise ValueError(
                f"criterion__weight has shape {tuple(weight.shape)}, but y has "
                f"{self.n_outputs} classes. Pass one weight per class."
            )
        if not weight.is_floating_point():
            raise ValueError(
                f"criterion__weight is of type {weight.dtype}. Pass weight.float()."
            )

    def check_net(self, net: NeuralNet) -> None:
        """Raise ValueError for several labels if the skorch net only supports one."""
        if self.target_type.is_single:
            return
        # skorch's stratified split and its binary classifier need one label per sample
        is_stratified = getattr(net.train_split, "stratified", False)
        if is_stratified or isinstance(net, NeuralNetBinaryClassifier):
            raise ValueError(
                f"estimator is a {type(net).__name__}, which supports one label per "
                "row. Use skorch.NeuralNet with criterion=torch.nn.BCEWithLogitsLoss, "
                "or train_split=None. If y is one-hot, pass y.argmax(axis=1)."
            )

    @property
    def are_plain(self) -> bool:
        """Whether the classes are 0 … K-1, and ignored labels are their own codes."""
        is_code = (_ignore_index(self.net) or -1) < 0
        return is_code and np.array_equal(self.classes, np.arange(len(self.classes)))


def _ignore_index(net: NeuralNet) -> int | None:
    """Return the ``ignore_index`` of a net's criterion, or None.

    Before initialisation, the criterion is a class. The index is then the parameter
    ``criterion__ignore_index`` of the net, or the default value of the class.
    """
    if net is None:  # the default network ignores no labels
        return None
    criterion = unwrapped(vars(net).get("criterion_") or net.criterion)
    if isinstance(criterion, torch.nn.Module):
        return getattr(criterion, "ignore_index", None)
    argument = inspect.signature(criterion).parameters.get("ignore_index")
    default = None if argument is None else argument.default
    return vars(net).get("criterion__ignore_index", default)


def normalised(proba: Tensor, n_classes: int) -> Tensor:
    """Normalise probabilities (b·r, K) over the classes seen in ``fit``."""
    # a network with one logit has two columns, even if fit had a single class
    proba = proba[:, :n_classes]
    return proba / proba.sum(1, keepdim=True)


def is_ignored(
    labels: np.ndarray, net: NeuralNet, classes: np.ndarray | None = None
) -> np.ndarray:
    """Return a mask of labels that the criterion ignores, with the labels' shape.

    torch's default index is ignored only if all other labels (or all classes, if they
    are known) are whole numbers from zero. Otherwise, it may be the name of a class.
    """
    index = _ignore_index(net)
    can_ignore = index is not None and labels.dtype.kind in "iuf"  # text is no index
    if can_ignore and index == _DEFAULT_INDEX:
        others = labels[labels != index] if classes is None else classes
        can_ignore = others.dtype.kind in "iu" and not (others < 0).any()
    return labels == index if can_ignore else np.zeros(labels.shape, dtype=bool)


def _classes_of_net(net: NeuralNet, observed: np.ndarray) -> np.ndarray | None:
    """Return a fitted net's classes if they include all classes in y, or None."""
    classes = np.asarray(getattr(net, "classes_", None))
    # other kinds cannot be compared; without ``classes_``, the array contains None
    if classes.dtype.kind != observed.dtype.kind:
        return None
    classes = classes[~is_ignored(classes, net)]
    return classes if np.isin(observed, classes).all() else None

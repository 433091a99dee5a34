"""Likelihoods of class labels.

`Categorical` has the loss ``-log p_y`` and ``Λ = diag p - p pᵀ``, where
``p = softmax(f)``. `Bernoulli` has ``Λ = p (1 - p)``, where ``p = sigmoid(f)``.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from sklaplace.likelihoods.base import Likelihood, SeparableLikelihood
from sklaplace.likelihoods.output_hessian import BlockDiagonal, OutputHessian, Softmax

# Largest number of classes for which a softmax over columns of the transpose is faster.
# torch does not vectorise short contiguous rows.
MAX_TRANSPOSED_CLASSES = 20


def _softmax(f: Tensor, function: Callable[..., Tensor] = torch.softmax) -> Tensor:
    """Apply ``torch.softmax`` or ``torch.log_softmax`` to each row, (b, K).

    The result has the memory layout of ``f``, except that with few classes, columns are
    contiguous. Reading columns as rows takes several times as long.
    """
    by_column = f.shape[-1] <= MAX_TRANSPOSED_CLASSES or f.stride(-1) != 1
    return function(f.mT, -2).mT if by_column else function(f, -1)


class ClassificationLikelihood(Likelihood):
    """Base class for likelihoods of class labels, with one label per sample.

    Read more in the :doc:`User Guide </user_guide/networks>`.

    See Also
    --------
    Categorical : Several classes, with one logit each.
    Bernoulli : Two classes with one logit.

    Examples
    --------
    >>> from sklaplace.likelihoods import Categorical, ClassificationLikelihood
    >>> isinstance(Categorical(), ClassificationLikelihood)
    True
    """

    is_classification = True
    noun = "class"
    multi_target: ClassVar[str] = ""
    """How to interpret several columns of ``y``: "multilabel" (labels that are 0 or 1),
    "dense" (one label at each position), or "" (not supported)."""

    def multilabel(self) -> "ClassificationLikelihood":
        """Return the likelihood of a matrix of 0/1 labels.

        Returns
        -------
        Likelihood
            Likelihood of all columns.

        Raises
        ------
        ValueError
            If the likelihood does not support several columns, as by default.

        See Also
        --------
        dense : Labels at positions.

        Examples
        --------
        >>> from sklaplace.likelihoods import Bernoulli
        >>> Bernoulli().multilabel()
        MultilabelBernoulli(pos_weight=(1.0,))
        """
        raise ValueError(
            "y has several columns, but should be a 1d array: "
            f"{type(self).__name__} supports only one label per row. For a matrix of "
            "labels that are 0 or 1, use criterion=torch.nn.BCEWithLogitsLoss."
        )

    def dense(self, positions: tuple[int, ...]) -> "ClassificationLikelihood":
        """Return the likelihood of one label at each position.

        Parameters
        ----------
        positions : tuple of int
            Shape of the targets of a sample.

        Returns
        -------
        Likelihood
            Likelihood of all positions.

        Raises
        ------
        ValueError
            If the likelihood does not support labels at positions, as by default.

        See Also
        --------
        multilabel : Labels that are 0 or 1.

        Examples
        --------
        >>> from sklaplace.likelihoods import Categorical
        >>> Categorical().dense((4, 5)).n_blocks
        20
        """
        raise ValueError(
            f"y has labels at positions {positions}, but {type(self).__name__} "
            "supports only one label per row. For maps of labels, use "
            "criterion=torch.nn.CrossEntropyLoss."
        )

    def n_targets(self, n_outputs: int) -> int:
        """Return one, the number of labels per sample."""
        return 1

    @abstractmethod
    def class_logits(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """Convert a Gaussian over the outputs to a Gaussian over one logit per class.

        Parameters
        ----------
        mean : Tensor of shape (b, c)
            Means of the outputs.
        cov : Tensor of shape (b, c, c), (b, c) or (b, r, K, K)
            Covariances or variances of the outputs, or one covariance matrix for each
            of r labels.

        Returns
        -------
        mean : Tensor of shape (b·r, K)
            Means of the logits of K classes.
        cov : Tensor of shape (b·r, K, K) or (b·r, K)
            Covariances or variances of the logits.

        See Also
        --------
        probabilities : Probabilities without uncertainty.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Bernoulli
        >>> f, y = torch.zeros(1, 1), torch.ones(1, 1)
        >>> mean, cov = Bernoulli().class_logits(f, torch.ones(1, 1, 1))
        >>> mean.shape, cov.shape
        (torch.Size([1, 2]), torch.Size([1, 2, 2]))
        """

    @abstractmethod
    def probabilities(self, f: Tensor) -> Tensor:
        """Convert outputs to class probabilities.

        Parameters
        ----------
        f : Tensor of shape (..., c)
            Outputs of the network.

        Returns
        -------
        Tensor of shape (..., K) or (..., r, K)
            Probabilities of K classes, for one label or for each of r labels.

        See Also
        --------
        class_logits : Logits with uncertainty.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Bernoulli
        >>> f, y = torch.zeros(1, 1), torch.ones(1, 1)
        >>> Bernoulli().probabilities(f)
        tensor([[0.5000, 0.5000]])
        """

    def log_loss(self, log_proba: Tensor, y: Tensor) -> Tensor:
        """Return the loss per sample, given log-probabilities.

        Parameters
        ----------
        log_proba : Tensor of shape (b·r, K)
            Log-probabilities of the classes of each label.
        y : Tensor
            Targets, as `targets` returns them.

        Returns
        -------
        Tensor of shape (b,)
            Weighted sum over labels, in nats.

        See Also
        --------
        loss : Loss, given outputs.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Categorical
        >>> f, y = torch.zeros(1, 2), torch.tensor([1])
        >>> Categorical().log_loss(f.log_softmax(-1), y)
        tensor([0.6931])
        """
        # negative labels have a weight of zero, and take the first class as an index
        classes = y.clamp(min=0).reshape(-1, 1).long()  # (b·r, 1)
        log_proba_of_labels = log_proba.gather(1, classes).reshape(len(y), -1)  # (b, r)
        return -self._weighted_sum(log_proba_of_labels, y)

    def _weighted_sum(self, values: Tensor, y: Tensor) -> Tensor:
        """Return the sum (b,) of values (b, r) over r labels with their weights."""
        weights = self.label_weights(y)
        return (values if weights is None else values * weights.to(values)).sum(1)


@dataclass(frozen=True)
class Categorical(ClassificationLikelihood):
    """Softmax over K logits, with class indices 0 … K-1 as targets.

    With class weights ``w`` and label smoothing ``ε``, the criterion is
    ``(1 - ε) w_y CE(y) + ε/K Σ w_k CE(k) = h_y CE(t)`` for smoothed targets ``t`` and
    ``h_y = (1 - ε) w_y + ε/K Σ w_k``. The loss and curvature of a sample are ``h_y``
    times the loss and curvature of ``CE(t)``.

    Read more in the :doc:`User Guide </user_guide/networks>`.

    Parameters
    ----------
    weight : tuple of float or None
        Weight of each class.
    label_smoothing : float
        Probability mass that is spread uniformly over all classes.

    See Also
    --------
    CategoricalMap : One label per position.
    Bernoulli : Two classes with one logit.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.likelihoods import Categorical
    >>> f, y = torch.zeros(1, 2), torch.tensor([1])
    >>> Categorical().loss(f, y)  # log 2
    tensor([0.6931])
    """

    weight: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    options: ClassVar[frozenset[str]] = frozenset({"weight", "label_smoothing"})
    is_shift_invariant = True
    multi_target: ClassVar[str] = "dense"

    def dense(self, positions: tuple[int, ...]) -> "CategoricalMap":
        """Return one categorical distribution per position."""
        return CategoricalMap(positions, self)

    def configured(self, criterion: nn.Module) -> "Categorical":
        """Return a copy with a criterion's ``weight`` and ``label_smoothing``."""
        weight = getattr(criterion, "weight", None)
        smoothing = float(getattr(criterion, "label_smoothing", 0.0))
        weights = None if weight is None else tuple(weight.reshape(-1).tolist())
        return Categorical(weights, smoothing)

    def loss_scale(self, y: Tensor) -> Tensor | None:
        """Return the factor of each sample's loss, (b,), float64, or None for ones.

        It is ``h_y = (1 - ε) w_y + ε mean(w)`` for class weights w and smoothing ε.
        """
        if self.weight is None:
            return None
        w = torch.tensor(self.weight, dtype=torch.float64, device=y.device)
        return (1 - self.label_smoothing) * w[y] + self.label_smoothing * w.mean()

    def _smoothed_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Return class probabilities ``t`` (b, K) that replace class indices y (b,).

        Without label smoothing, they are one-hot vectors. Outputs f (b, K) determine
        only the dtype and the number of classes. Class weights shift the smoothing
        towards classes with a large weight.
        """
        one_hot = nn.functional.one_hot(y, f.shape[-1]).to(f)
        if not self.label_smoothing:
            return one_hot
        ones = f.new_ones(f.shape[-1])
        w = ones if self.weight is None else f.new_tensor(self.weight)
        # a class gets the same share of the smoothing in every sample, (K,)
        spread = self.label_smoothing * w / len(w)
        weighted = (1 - self.label_smoothing) * w[y].unsqueeze(-1) * one_hot + spread
        # the sums are the factors h_y of the losses, which `loss_scale` returns
        return weighted / weighted.sum(-1, keepdim=True)

    def targets(self, y: Tensor, f: Tensor) -> Tensor:
        """Return class indices, (b,), int64."""
        return y.reshape(len(f)).long()

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy per sample, (b,)."""
        log_proba = _softmax(f, torch.log_softmax)
        # without class weights, which `loss_scale` returns
        if self.label_smoothing:
            return -(self._smoothed_targets(f, y) * log_proba).sum(-1)
        return nn.functional.nll_loss(log_proba, y, reduction="none")

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``softmax(f) - t`` for the smoothed target ``t``, (b, c)."""
        if not self.label_smoothing:
            return self.score(f, y)
        return _softmax(f) - self._smoothed_targets(f, y)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``softmax(f) - onehot(y)``, (b, c)."""
        # a clone has the same memory layout, and changing it keeps autograd intact
        minus_one = f.new_full((len(f), 1), -1)
        return _softmax(f).clone().scatter_add_(-1, y.unsqueeze(-1), minus_one)

    def hessian(self, f: Tensor) -> OutputHessian:
        """Return ``diag p - p pᵀ``."""
        p = _softmax(f.double())
        return Softmax(p, p.new_ones(len(p)), f.dtype)

    def hessian_operator(self, f: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function ``u -> p ∘ (u - pᵀu)``."""
        p = _softmax(f)

        def product(u: Tensor) -> Tensor:
            weighted = p * u
            return weighted.addcmul_(p, weighted.sum(-1, keepdim=True), value=-1)

        return product

    def draw(self, f: Tensor, u: Tensor) -> Tensor:
        """Draw class indices (b,), given outputs (b, K) and uniform numbers (b, 1)."""
        cumulative = f.double().softmax(-1).cumsum(-1)
        # the index is the number of cumulative probabilities below u; without the last
        # one, rounding errors cannot lead beyond the last class
        return (cumulative[:, :-1] < u).sum(-1)

    def class_logits(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Gaussian over the outputs, which are the logits."""
        return mean, cov

    def probabilities(self, f: Tensor) -> Tensor:
        """Return class probabilities (..., K) of outputs (..., c)."""
        return f.softmax(-1)


class _Sigmoid(SeparableLikelihood, ClassificationLikelihood):
    """Likelihood of independent labels that are 0 or 1, with one logit each."""

    options: ClassVar[frozenset[str]] = frozenset({"pos_weight"})
    multi_target: ClassVar[str] = "multilabel"

    def targets(self, y: Tensor, f: Tensor) -> Tensor:
        """Return zeros and ones, (b, c), in the dtype of the outputs."""
        return y.reshape(f.shape).to(f)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the weighted binary cross-entropy, summed over labels, (b,)."""
        losses = nn.functional.binary_cross_entropy_with_logits(f, y, reduction="none")
        return self._weighted_sum(losses, y)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``sigmoid(f) - y``, (b, c)."""
        return f.sigmoid() - y

    def root_hessian(self, f: Tensor) -> Tensor:
        """Compute ``√(p (1 - p))`` exactly near p = 1, as a product of sigmoids."""
        return (f.sigmoid() * (-f).sigmoid()).sqrt()

    def draw(self, f: Tensor, u: Tensor) -> Tensor:
        """Draw zeros and ones, (b, c)."""
        return (u < f.double().sigmoid()).to(f)

    def class_logits(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Gaussian over logits ``(-f/2, f/2)`` for each label.

        Its means are (b·L, 2), and its covariances (b·L, 2, 2). The softmax of the two
        logits has the probabilities ``sigmoid(-f)`` and ``sigmoid(f)``, so that a label
        is treated like two classes. The result omits covariances between labels,
        because each label is predicted independently.
        """
        # only variances, (b, L), from one matrix (L, L) per sample or (1, 1) per label
        if cov.ndim > mean.ndim:
            cov = cov.diagonal(dim1=-2, dim2=-1)
        signs = mean.new_tensor([-0.5, 0.5])
        variances = cov.reshape(-1, 1, 1).to(mean)
        return mean.reshape(-1, 1) * signs, variances * torch.outer(signs, signs)


@dataclass(frozen=True)
class Bernoulli(_Sigmoid):
    """Likelihood of two classes, with a single logit for the second class.

    Read more in the :doc:`User Guide </user_guide/networks>`.

    Parameters
    ----------
    pos_weight : float
        Weight of the loss for samples of the second class.

    See Also
    --------
    MultilabelBernoulli : Several labels.
    Categorical : One logit per class.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.likelihoods import Bernoulli
    >>> f, y = torch.zeros(1, 1), torch.ones(1, 1)
    >>> Bernoulli(pos_weight=3.0).loss_scale(y)
    tensor([3.], dtype=torch.float64)
    """

    pos_weight: float = 1.0

    def configured(self, criterion: nn.Module) -> "Bernoulli":
        """Return a copy with a criterion's ``pos_weight``."""
        weight = getattr(criterion, "pos_weight", None)
        if weight is not None and weight.numel() > 1:
            raise ValueError(
                f"criterion__pos_weight has {weight.numel()} entries, but y has one "
                "label per row. Pass one number, or one column of y per entry."
            )
        return Bernoulli(1.0 if weight is None else float(weight.reshape(-1)[0]))

    def multilabel(self) -> "MultilabelBernoulli":
        """Return one Bernoulli distribution per column of ``y``."""
        return MultilabelBernoulli((self.pos_weight,))

    def loss_scale(self, y: Tensor) -> Tensor | None:
        """Return ``pos_weight`` for the second class, else one, (b,), float64."""
        if self.pos_weight == 1:
            return None
        return 1 + (self.pos_weight - 1) * y.double().reshape(-1)

    def n_outputs(self, n_targets: int) -> int:
        """Return one logit for up to two classes; more classes need one logit each."""
        return 1 if n_targets <= 2 else n_targets

    def class_logits(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Gaussian over ``(-f/2, f/2)``, whose softmax is the sigmoid.

        ``cov`` has variances (b, 1) or covariances (b, 1, 1) of the logit f.
        """
        signs = mean.new_tensor([-0.5, 0.5])
        is_variance = cov.ndim == mean.ndim
        # the logits are signs · f, so their covariance is cov · signs signsᵀ
        return mean * signs, cov * (signs**2 if is_variance else signs.outer(signs))

    def probabilities(self, f: Tensor) -> Tensor:
        """Return class probabilities (..., 2) of outputs (..., 1)."""
        return torch.cat([(-f).sigmoid(), f.sigmoid()], -1)


@dataclass(frozen=True)
class MultilabelBernoulli(_Sigmoid):
    """Likelihood of L independent labels that are 0 or 1, with one logit each.

    The loss is a sum over labels. Labels equal to 1 have weight ``pos_weight``.

    Read more in the :doc:`User Guide </user_guide/networks>`.

    Parameters
    ----------
    pos_weight : tuple of float
        Weight of each label, or one weight for all labels.

    See Also
    --------
    Bernoulli : One label.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.likelihoods import MultilabelBernoulli
    >>> MultilabelBernoulli().probabilities(torch.zeros(1, 3)).shape
    torch.Size([1, 3, 2])
    """

    pos_weight: tuple[float, ...] = (1.0,)
    noun = "label"

    def configured(self, criterion: nn.Module) -> "MultilabelBernoulli":
        """Return a copy with a criterion's ``pos_weight``."""
        weight = getattr(criterion, "pos_weight", None)
        if weight is None:
            return self
        return MultilabelBernoulli(tuple(weight.reshape(-1).tolist()))

    def multilabel(self) -> "MultilabelBernoulli":
        """Return the likelihood itself."""
        return self

    def n_targets(self, n_outputs: int) -> int:
        """Return the number of labels, one per logit."""
        return n_outputs

    def n_outputs(self, n_targets: int) -> int:
        """Return the number of logits, one per label, after checking ``pos_weight``."""
        n = len(self.pos_weight)
        if n not in (1, n_targets):
            raise ValueError(
                f"criterion__pos_weight has {n} entries, but y has {n_targets} labels. "
                "Pass one number, or one per label."
            )
        return n_targets

    def label_weights(self, y: Tensor) -> Tensor | None:
        """Return ``pos_weight`` for labels that are 1, else one, (b, L), float64."""
        if set(self.pos_weight) == {1.0}:
            return None
        weights = torch.tensor(self.pos_weight, dtype=torch.float64, device=y.device)
        return 1 + (weights - 1) * y.double()

    def probabilities(self, f: Tensor) -> Tensor:
        """Return the probabilities of 0 and 1 for each label, (..., L, 2)."""
        return torch.stack([(-f).sigmoid(), f.sigmoid()], -1)


@dataclass(frozen=True)
class CategoricalMap(ClassificationLikelihood):
    """Likelihood of independent labels at r positions, given K logits per position.

    Outputs have shape (b, r·K), ordered by position. Targets have shape (b, r). The
    loss is a sum over positions. Positions with a negative label are ignored.

    Read more in the :doc:`User Guide </user_guide/networks>`.

    Parameters
    ----------
    positions : tuple of int
        Shape of the map, with r positions in total.
    categorical : Categorical
        Likelihood at each position.

    See Also
    --------
    Categorical : One label per sample.

    Examples
    --------
    >>> from sklaplace.likelihoods import CategoricalMap
    >>> CategoricalMap(positions=(4, 5)).n_outputs(3)
    60
    """

    positions: tuple[int, ...]
    categorical: Categorical = Categorical()
    options: ClassVar[frozenset[str]] = Categorical.options
    multi_target: ClassVar[str] = "dense"
    is_shift_invariant = True

    @property
    def n_blocks(self) -> int:
        """Number of positions, r."""
        return math.prod(self.positions)

    def configured(self, criterion: nn.Module) -> "CategoricalMap":
        """Return a copy with the options of a criterion."""
        return replace(self, categorical=self.categorical.configured(criterion))

    def dense(self, positions: tuple[int, ...]) -> "CategoricalMap":
        """Return a copy for a map of a different shape."""
        return replace(self, positions=positions)

    def n_targets(self, n_outputs: int) -> int:
        """Return the number of labels, one per position."""
        return self.n_blocks

    def n_outputs(self, n_targets: int) -> int:
        """Return the number of logits, one per class and position."""
        return n_targets * self.n_blocks

    def output_shape(self, n_targets: int) -> tuple[int, ...]:
        """Return ``(K, *positions)``, as in torch."""
        return (n_targets, *self.positions)

    def _flat(self, f: Tensor) -> Tensor:
        """Reshape outputs (b, r·K) to one row per position, (b·r, K)."""
        return f.reshape(-1, f.shape[-1] // self.n_blocks)

    def targets(self, y: Tensor, f: Tensor) -> Tensor:
        """Return class indices, (b, r), int64."""
        return y.reshape(len(f), self.n_blocks).long()

    def label_weights(self, y: Tensor) -> Tensor | None:
        """Return the weight of each position, (b, r), float64, or None for ones.

        Negative labels are ignored, so they have a weight of zero.
        """
        # zero stands for negative labels, which are no indices of class weights
        scale = self.categorical.loss_scale(y.clamp(min=0))
        if scale is None and bool((y >= 0).all()):
            return None
        is_labelled = (y >= 0).double()
        return is_labelled if scale is None else is_labelled * scale

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the weighted cross-entropy, summed over positions, (b,)."""
        losses = self.categorical.loss(self._flat(f), y.clamp(min=0).flatten())
        return self._weighted_sum(losses.reshape(y.shape), y)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ``softmax(f) - onehot(y)`` at each position, (b, r·K)."""
        return self.categorical.score(self._flat(f), y.flatten()).reshape(f.shape)

    def hessian(self, f: Tensor) -> OutputHessian:
        """Return the block-diagonal Hessian, with ``diag p - p pᵀ`` per position."""
        return BlockDiagonal(self.categorical.hessian(self._flat(f)), self.n_blocks)

    def hessian_operator(self, f: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function ``u -> p ∘ (u - pᵀu)`` at each position."""
        product = self.categorical.hessian_operator(self._flat(f))
        return lambda u: product(self._flat(u)).reshape(u.shape)

    def draw(self, f: Tensor, u: Tensor) -> Tensor:
        """Draw class indices, (b, r)."""
        return self.categorical.draw(self._flat(f), u.reshape(-1, 1)).reshape(u.shape)

    def class_logits(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Gaussian over the K logits of each position, (b·r, K)."""
        logits = self._flat(mean)
        if cov.ndim == mean.ndim:  # variances (b, r·K)
            return logits, self._flat(cov)
        n_classes = logits.shape[1]
        if cov.ndim == mean.ndim + 1:  # covariances (b, r·K, r·K) of all outputs
            axes = self.n_blocks, n_classes
            between = cov.unflatten(2, axes).unflatten(1, axes)  # (b, r, K, r, K)
            # only covariances within a position are needed
            cov = between.diagonal(dim1=1, dim2=3).movedim(-1, 1)
        # one matrix for each position, (b, r, K, K)
        return logits, cov.reshape(-1, n_classes, n_classes)

    def probabilities(self, f: Tensor) -> Tensor:
        """Return class probabilities (..., r, K) of outputs (..., r·K)."""
        return f.reshape(*f.shape[:-1], self.n_blocks, -1).softmax(-1)

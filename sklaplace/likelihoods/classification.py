"""Likelihoods of class labels."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sklaplace.likelihoods.base import BaseLikelihood
from sklaplace.likelihoods.output_hessian import (
    BlockDiagonal,
    Diagonal,
    Factored,
    OutputHessian,
    Softmax,
)


class Labels(BaseLikelihood):
    """To derive likelihoods of labels from: no noise, and one label per row."""

    has_noise = False
    noun = "class"
    columns: ClassVar[str] = ""

    def of_labels(self) -> Any:
        """Refused where a label is not zero or one."""
        raise ValueError(
            "y has several columns, and should be a 1d array: "
            f"{type(self).__name__} is a likelihood of one label per row. Use "
            "criterion=torch.nn.BCEWithLogitsLoss for a matrix of labels that are 0 or "
            "1."
        )

    def of_map(self, positions: tuple[int, ...]) -> Any:
        """Refused where classes have no softmax."""
        raise ValueError(
            f"y has labels at positions {positions}, and {type(self).__name__} is a "
            "likelihood of one label per row. Use criterion=torch.nn.CrossEntropyLoss "
            "for maps of labels."
        )

    def log_loss(self, log_proba: Tensor, y: Tensor) -> Tensor:
        """Negative log-probability of the labels, summed over those of a row, (b,)."""
        chosen = log_proba.gather(1, y.reshape(-1, 1).long())
        return -chosen.reshape(len(y), -1).sum(1)

    def scale(self, sigma_noise: Tensor) -> Tensor:
        """One: there is no noise parameter."""
        return torch.ones_like(sigma_noise)

    def log_normalizer(self, sigma_noise: Tensor) -> Tensor:
        """Zero: probabilities are normalised already."""
        return torch.zeros_like(sigma_noise)

    def n_targets(self, n_outputs: int) -> int:
        """One label per row."""
        return 1


@dataclass(frozen=True)
class Categorical(Labels):
    """Softmax over K logits; targets are class indices 0 … K-1.

    With class weights ``w`` and label smoothing ``ε`` the criterion is
    ``(1 - ε) w_y CE(y) + ε/K Σ w_k CE(k)``, which is ``h_y CE(t)`` for targets ``t``
    that are spread over the classes and ``h_y = (1 - ε) w_y + ε/K Σ w_k``: the row's
    loss and curvature times ``h_y``.

    Attributes
    ----------
    weight : tuple of float or None
        One per class.
    label_smoothing : float
        Share of a target that all classes have in common.
    """

    weight: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    options: ClassVar[frozenset[str]] = frozenset({"weight", "label_smoothing"})
    is_shift_invariant = True
    columns: ClassVar[str] = "positions"

    def of_map(self, positions: tuple[int, ...]) -> "CategoricalMap":
        """The same at every position."""
        return CategoricalMap(positions, self)

    def configured(self, criterion: nn.Module) -> "Categorical":
        """The same with ``weight`` and ``label_smoothing`` of a criterion."""
        weight = getattr(criterion, "weight", None)
        smoothing = float(getattr(criterion, "label_smoothing", 0.0))
        return Categorical(
            None if weight is None else tuple(weight.tolist()), smoothing
        )

    def row_scale(self, y: Tensor) -> Tensor | None:
        """``h_y``, (b,), float64."""
        if self.weight is None:
            return None
        w = torch.tensor(self.weight, dtype=torch.float64, device=y.device)
        return (1 - self.label_smoothing) * w[y] + self.label_smoothing * w.mean()

    def _spread(self, f: Tensor, y: Tensor) -> Tensor:
        """Targets as distributions over the classes, (b, K)."""
        own = nn.functional.one_hot(y, f.shape[-1]).to(f)
        if not self.label_smoothing:
            return own
        w = f.new_ones(f.shape[-1])
        if self.weight is not None:
            w = torch.tensor(self.weight, dtype=f.dtype, device=f.device)
        shared = self.label_smoothing * w / len(w)
        mixed = (1 - self.label_smoothing) * w[y].unsqueeze(-1) * own + shared
        return mixed / mixed.sum(-1, keepdim=True)

    def targets(self, y: Tensor, f: Tensor) -> Tensor:
        """Class indices, (b,), int64."""
        return y.reshape(len(f)).long()

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy per row, (b,)."""
        if self.label_smoothing:
            return -(self._spread(f, y) * f.log_softmax(-1)).sum(-1)
        return nn.functional.cross_entropy(f, y, reduction="none")

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """``softmax(f)`` less the target, which smoothing spreads, (b, c)."""
        return f.softmax(-1) - self._spread(f, y)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """``softmax(f) - onehot(y)``: nobody smooths labels that the network draws."""
        return f.softmax(-1) - nn.functional.one_hot(y, f.shape[-1]).to(f)

    def hessian(self, f: Tensor) -> OutputHessian:
        """``diag p - p pᵀ``."""
        p = f.double().softmax(-1)
        return Softmax(p, p.new_ones(len(p)), f.dtype)

    def hessian_operator(self, f: Tensor) -> Callable[[Tensor], Tensor]:
        """``u -> p ∘ (u - pᵀu)``."""
        p = f.softmax(-1)
        return lambda u: p * (u - (p * u).sum(-1, keepdim=True))

    def n_draws(self, n_outputs: int) -> int:
        """One label."""
        return 1

    def draw(self, f: Tensor, u: Tensor) -> Tensor:
        """Class indices, (b,), by their cumulative probabilities."""
        # the last class takes what rounding leaves
        below = f.double().softmax(-1).cumsum(-1)[:, :-1] < u
        return below.sum(-1)

    def width(self, n_targets: int) -> int:
        """One logit per class."""
        return n_targets

    def class_logits(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """Gaussian over one logit per class: the outputs themselves."""
        return mean, cov

    def probabilities(self, f: Tensor) -> Tensor:
        """Class probabilities (..., K) of outputs (..., c)."""
        return f.softmax(-1)


@dataclass(frozen=True)
class Bernoulli(Labels):
    """Two classes from one logit: that of the second class.

    Attributes
    ----------
    pos_weight : float
        What the loss of rows of the second class is multiplied by.
    """

    pos_weight: float = 1.0
    options: ClassVar[frozenset[str]] = frozenset({"pos_weight"})
    columns: ClassVar[str] = "labels"

    def configured(self, criterion: nn.Module) -> "Bernoulli":
        """The same with ``pos_weight`` of a criterion."""
        weight = getattr(criterion, "pos_weight", None)
        if weight is not None and weight.numel() > 1:
            raise ValueError(
                f"criterion__pos_weight has {weight.numel()} entries, but y has one "
                "label per row. Give one number, or one column of y for each."
            )
        return Bernoulli(1.0 if weight is None else float(weight.reshape(-1)[0]))

    def of_labels(self) -> "MultilabelBernoulli":
        """The same, one for each column of targets."""
        return MultilabelBernoulli((self.pos_weight,))

    def row_scale(self, y: Tensor) -> Tensor | None:
        """One, or the weight of the second class, (b,), float64."""
        if self.pos_weight == 1:
            return None
        return 1 + (self.pos_weight - 1) * y.double().reshape(-1)

    def targets(self, y: Tensor, f: Tensor) -> Tensor:
        """Zeros and ones, (b, 1), in the dtype of the outputs."""
        return y.reshape(len(f), 1).to(f)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Binary cross-entropy per row, (b,)."""
        losses = nn.functional.binary_cross_entropy_with_logits(f, y, reduction="none")
        return losses.sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """``sigmoid(f) - y``, (b, 1)."""
        return f.sigmoid() - y

    def hessian(self, f: Tensor) -> OutputHessian:
        """``p (1 - p)``."""
        # as a product of sigmoids it keeps digits where p rounds to 1
        return Factored((f.sigmoid() * (-f).sigmoid()).sqrt().unsqueeze(-1))

    def hessian_operator(self, f: Tensor) -> Callable[[Tensor], Tensor]:
        """``u -> p (1 - p) u``."""
        curvature = f.sigmoid() * (-f).sigmoid()
        return lambda u: curvature * u

    def n_draws(self, n_outputs: int) -> int:
        """One label per logit."""
        return n_outputs

    def draw(self, f: Tensor, u: Tensor) -> Tensor:
        """Zeros and ones, (b, 1)."""
        return (u < f.double().sigmoid()).to(f)

    def width(self, n_targets: int) -> int:
        """One logit, for one or two classes."""
        return 1 if n_targets <= 2 else n_targets

    def class_logits(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """Gaussian over two logits ``(-f/2, f/2)``, whose softmax is the sigmoid."""
        sides = mean.new_tensor([-0.5, 0.5])
        products = sides**2 if cov.ndim == mean.ndim else torch.outer(sides, sides)
        return mean * sides, cov * products

    def probabilities(self, f: Tensor) -> Tensor:
        """Class probabilities (..., 2) of outputs (..., 1)."""
        return torch.cat([(-f).sigmoid(), f.sigmoid()], -1)


@dataclass(frozen=True)
class MultilabelBernoulli(Labels):
    """Several labels that are zero or one, independent given a logit for each.

    A row is a sample, its labels are L observed values: their losses add up, and each
    is multiplied by its ``pos_weight`` where the label is one.

    Attributes
    ----------
    pos_weight : tuple of float
        One per label, or one for all.
    """

    pos_weight: tuple[float, ...] = (1.0,)
    noun = "label"
    options: ClassVar[frozenset[str]] = frozenset({"pos_weight"})
    columns: ClassVar[str] = "labels"

    def configured(self, criterion: nn.Module) -> "MultilabelBernoulli":
        """The same with ``pos_weight`` of a criterion."""
        weight = getattr(criterion, "pos_weight", None)
        if weight is None:
            return self
        return MultilabelBernoulli(tuple(weight.reshape(-1).tolist()))

    def of_labels(self) -> "MultilabelBernoulli":
        """What it is already."""
        return self

    def n_targets(self, n_outputs: int) -> int:
        """One label per logit."""
        return n_outputs

    def width(self, n_targets: int) -> int:
        """One logit per label; refuses weights that are not one per label."""
        n = len(self.pos_weight)
        if n not in (1, n_targets):
            raise ValueError(
                f"criterion__pos_weight has {n} entries, but y has {n_targets} labels. "
                "Give one number, or one per label."
            )
        return n_targets

    def targets(self, y: Tensor, f: Tensor) -> Tensor:
        """Zeros and ones, (b, L), in the dtype of the outputs."""
        return y.reshape(f.shape).to(f)

    def label_weights(self, y: Tensor) -> Tensor | None:
        """One, or the label's weight where it is one, (b, L), float64."""
        if set(self.pos_weight) == {1.0}:
            return None
        weights = torch.tensor(self.pos_weight, dtype=torch.float64, device=y.device)
        return 1 + (weights - 1) * y.double()

    def _weigh(self, values: Tensor, y: Tensor) -> Tensor:
        weights = self.label_weights(y)
        return values if weights is None else values * weights.to(values)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Binary cross-entropy per row, summed over labels, (b,)."""
        losses = nn.functional.binary_cross_entropy_with_logits(f, y, reduction="none")
        return self._weigh(losses, y).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """``sigmoid(f) - y``, times the label's weight, (b, L)."""
        return self._weigh(self.score(f, y), y)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """``sigmoid(f) - y``: nobody weighs labels that the network draws."""
        return f.sigmoid() - y

    def hessian(self, f: Tensor) -> OutputHessian:
        """``diag p (1 - p)``."""
        # as a product of sigmoids it keeps digits where p rounds to 1
        return Diagonal((f.sigmoid() * (-f).sigmoid()).sqrt())

    def hessian_operator(self, f: Tensor) -> Callable[[Tensor], Tensor]:
        """``u -> p (1 - p) u``."""
        curvature = f.sigmoid() * (-f).sigmoid()
        return lambda u: curvature * u

    def n_draws(self, n_outputs: int) -> int:
        """One label per logit."""
        return n_outputs

    def draw(self, f: Tensor, u: Tensor) -> Tensor:
        """Zeros and ones, (b, L)."""
        return (u < f.double().sigmoid()).to(f)

    def class_logits(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """Gaussian over two logits ``(-f/2, f/2)`` for each label, (b·L, 2).

        Of a covariance the diagonal is taken: labels are predicted one by one.
        """
        if cov.ndim > mean.ndim:
            cov = cov.diagonal(dim1=-2, dim2=-1)
        sides = mean.new_tensor([-0.5, 0.5])
        variances = cov.reshape(-1, 1, 1).to(mean)
        return mean.reshape(-1, 1) * sides, variances * torch.outer(sides, sides)

    def probabilities(self, f: Tensor) -> Tensor:
        """Probabilities (..., L, 2) that labels are zero and one."""
        return torch.stack([(-f).sigmoid(), f.sigmoid()], -1)

    def log_loss(self, log_proba: Tensor, y: Tensor) -> Tensor:
        """Negative log-probability of the labels, weighted and summed, (b,)."""
        chosen = log_proba.gather(1, y.reshape(-1, 1).long()).reshape(y.shape)
        return -self._weigh(chosen, y).sum(1)


@dataclass(frozen=True)
class CategoricalMap(Labels):
    """One label at every position, independent given K logits for each.

    Outputs are (b, r·K), position by position; targets (b, r). Losses of positions add
    up; those with a negative label are left out.

    Attributes
    ----------
    positions : tuple of int
        Shape of a map, of r positions in all.
    one : Categorical
        Of a single position.
    """

    positions: tuple[int, ...]
    one: Categorical = Categorical()
    options: ClassVar[frozenset[str]] = Categorical.options
    columns: ClassVar[str] = "positions"
    is_shift_invariant = True

    @property
    def n_blocks(self) -> int:  # type: ignore[override]
        """One for each position."""
        return math.prod(self.positions)

    def configured(self, criterion: nn.Module) -> "CategoricalMap":
        """The same with the options of a criterion."""
        return replace(self, one=self.one.configured(criterion))

    def of_map(self, positions: tuple[int, ...]) -> "CategoricalMap":
        """The same for maps of this shape."""
        return replace(self, positions=positions)

    def n_targets(self, n_outputs: int) -> int:
        """One label per position."""
        return self.n_blocks

    def width(self, n_targets: int) -> int:
        """One logit per class and position."""
        return n_targets * self.n_blocks

    def output_shape(self, n_targets: int) -> tuple[int, ...]:
        """Classes first, as torch has it."""
        return (n_targets, *self.positions)

    def _flat(self, f: Tensor) -> Tensor:
        """Outputs (b, r·K) as those of positions, (b·r, K)."""
        return f.reshape(-1, f.shape[-1] // self.n_blocks)

    def targets(self, y: Tensor, f: Tensor) -> Tensor:
        """Class indices, (b, r), int64."""
        return y.reshape(len(f), self.n_blocks).long()

    def label_weights(self, y: Tensor) -> Tensor | None:
        """What each position counts, (b, r), float64; None: one."""
        own = self.one.row_scale(y.clamp(min=0))
        if own is None and bool((y >= 0).all()):
            return None
        known = (y >= 0).double()
        return known if own is None else known * own

    def _summed(self, losses: Tensor, y: Tensor) -> Tensor:
        """Losses (b·r,) of positions, weighted, and summed over each row, (b,)."""
        losses = losses.reshape(y.shape)
        weights = self.label_weights(y)
        return (losses if weights is None else losses * weights.to(losses)).sum(1)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy per row, summed over positions, (b,)."""
        losses = self.one.loss(self._flat(f), y.clamp(min=0).flatten())
        return self._summed(losses, y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """That of each position, times its weight, (b, r·K)."""
        slopes = self.one.gradient(self._flat(f), y.clamp(min=0).flatten())
        weights = self.label_weights(y)
        if weights is not None:
            slopes = slopes * weights.reshape(-1, 1).to(slopes)
        return slopes.reshape(f.shape)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """The same for labels that the network draws, (b, r·K)."""
        return self.one.score(self._flat(f), y.flatten()).reshape(f.shape)

    def hessian(self, f: Tensor) -> OutputHessian:
        """``diag p - p pᵀ`` of each position."""
        return BlockDiagonal(self.one.hessian(self._flat(f)), self.n_blocks)

    def hessian_operator(self, f: Tensor) -> Callable[[Tensor], Tensor]:
        """That of each position."""
        product = self.one.hessian_operator(self._flat(f))
        return lambda u: product(self._flat(u)).reshape(u.shape)

    def n_draws(self, n_outputs: int) -> int:
        """One label per position."""
        return self.n_blocks

    def draw(self, f: Tensor, u: Tensor) -> Tensor:
        """Class indices, (b, r)."""
        return self.one.draw(self._flat(f), u.reshape(-1, 1)).reshape(u.shape)

    def class_logits(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """Gaussian over the K logits of each position, (b·r, K)."""
        logits = self._flat(mean)
        if cov.ndim == mean.ndim:
            return logits, self._flat(cov)
        n_classes = logits.shape[1]
        if cov.ndim == mean.ndim + 1:
            groups = self.n_blocks, n_classes
            whole = cov.unflatten(2, groups).unflatten(1, groups)
            cov = whole.diagonal(dim1=1, dim2=3).movedim(-1, 1)  # (b, r, K, K)
        return logits, cov.reshape(-1, n_classes, n_classes)

    def probabilities(self, f: Tensor) -> Tensor:
        """Class probabilities (..., r, K) of outputs (..., r·K)."""
        return f.reshape(*f.shape[:-1], self.n_blocks, -1).softmax(-1)

    def log_loss(self, log_proba: Tensor, y: Tensor) -> Tensor:
        """Negative log-probability of the labels, weighted and summed, (b,)."""
        chosen = log_proba.gather(1, y.clamp(min=0).reshape(-1, 1))
        return -self._summed(chosen, y)

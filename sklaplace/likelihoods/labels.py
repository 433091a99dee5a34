"""Likelihoods of class labels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sklaplace.hessians import Diagonal, Factored, OutputHessian, Softmax
from sklaplace.likelihoods.base import Curved


class Labels(Curved):
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
        """Negative log-probability of the labels, weighed and summed, (b,)."""
        chosen = log_proba.gather(1, y.reshape(-1, 1).long()).reshape(y.shape)
        return -self._weigh(chosen, y).sum(1)

"""Likelihoods: how outputs of the network and targets make a loss.

Every likelihood has the form
``log p(y | f) = -scale · loss(f, y) - log_normalizer`` per row, where only
``scale`` and ``log_normalizer`` depend on the observation noise. The Hessian of
``loss`` in the outputs, ``Λ = S Sᵀ``, is therefore free of the noise, which
stays tunable after the curvature has been accumulated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor, nn

from sklaplace.likelihoods.output_hessian import OutputHessian

Array = np.ndarray[Any, Any]
Pair = tuple[Array, Array]


class Likelihood(Protocol):
    """What the rest of the package asks of a likelihood.

    ``f`` is (b, c); ``y`` has one row per row of ``f``.
    """

    options: ClassVar[frozenset[str]]
    """Arguments of a criterion that are understood, beyond those that say nothing."""
    noun: str
    """What `width` counts: classes, or columns of targets."""
    is_convex: bool
    """Whether ``loss`` is convex in the outputs, so that a head can be refitted."""
    has_noise: bool
    is_shift_invariant: bool
    """Whether a shift common to all outputs, of a block, changes nothing."""
    n_blocks: int
    """Blocks that the outputs fall into, side by side: predicted one by one."""

    def configured(self, criterion: nn.Module) -> "Likelihood":
        """The same with the options of a criterion."""

    def targets(self, y: Tensor, f: Tensor) -> Tensor:
        """``y`` in the shape and dtype that ``loss`` expects."""

    def row_scale(self, y: Tensor) -> Tensor | None:
        """What the loss of a row is multiplied by, (b,), float64; None: one."""

    def label_weights(self, y: Tensor) -> Tensor | None:
        """What the loss of each label is multiplied by, (b, r), float64; None: one.

        ``loss`` and ``gradient`` have it, which know the targets; ``hessian``, which
        does not, is to be multiplied: see `output_weights`.
        """

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Loss per row, (b,), in nats once multiplied by ``scale``."""

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Gradient of ``loss`` in the outputs, (b, c)."""

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """The same for targets that `draw` gave: without what a criterion adds."""

    def hessian(self, f: Tensor) -> OutputHessian:
        """Hessian ``Λ`` of ``loss`` in the outputs, not written out."""

    def hessian_factor(self, f: Tensor) -> Tensor:
        """``S`` (b, c, k) with ``S Sᵀ = Λ``."""

    def hessian_operator(self, f: Tensor) -> Callable[[Tensor], Tensor]:
        """``u -> Λ u`` for (b, c), without the factor: O(b·c) time and memory."""

    def n_draws(self, n_outputs: int) -> int:
        """Uniform numbers that one draw of the targets of a row takes."""

    def draw(self, f: Tensor, u: Tensor) -> Tensor:
        """Targets at unit scale by the quantiles ``u`` (b, n_draws), as ``loss``."""

    def scale(self, sigma_noise: Tensor) -> Tensor:
        """Factor from ``loss`` to negative log-likelihood."""

    def log_normalizer(self, sigma_noise: Tensor) -> Tensor:
        """Part of the negative log-likelihood that ignores outputs, per row."""

    def n_targets(self, n_outputs: int) -> int:
        """Number of observed values per row."""

    def width(self, n_targets: int) -> int:
        """Outputs that are needed for so many classes or target columns."""

    def output_shape(self, n_targets: int) -> tuple[int, ...]:
        """The same as the shape that a module gives each row."""


class ClassLikelihood(Likelihood, Protocol):
    """A likelihood whose targets are classes: r labels per row, often one."""

    columns: ClassVar[str]
    """What columns of targets are, a key of ``LABELLINGS``; empty: one label only."""

    def of_labels(self) -> "ClassLikelihood":
        """The same for a matrix of labels that are zero or one."""

    def of_map(self, positions: tuple[int, ...]) -> "ClassLikelihood":
        """The same for one label at every position of a map."""

    def class_logits(self, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """Gaussian over one logit per class, (b·r, K), from one over the outputs.

        ``cov`` is (b, c, c), or (b, c) for variances alone; (b, r, K, K) of blocks.
        """

    def probabilities(self, f: Tensor) -> Tensor:
        """Class probabilities (..., K) of outputs (..., c); (..., r, K) of labels."""

    def log_loss(self, log_proba: Tensor, y: Tensor) -> Tensor:
        """Loss per row, (b,), under log-probabilities (b·r, K) of the classes."""


class NumberLikelihood(Likelihood, Protocol):
    """A likelihood whose targets are numbers, (b, t), from outputs (b, c).

    Outputs are Gaussian with ``mean`` and ``variance``; ``noise`` is σ, where there is
    one. Arrays are of numpy.
    """

    def check_targets(self, y: np.ndarray) -> None:
        """Refuse targets that cannot be."""

    def moments(self, mean: Array, variance: Array, noise: float) -> Pair:
        """Mean and variance of new targets, (n, t), from (n, c)."""

    def joint_moments(self, mean: Array, cov: Array, noise: float) -> Pair:
        """Mean (n, t) and covariance (n, n, t) across rows, from (n, c), (n, n, c)."""

    def quantiles(
        self, mean: Array, variance: Array, noise: float, levels: Array
    ) -> Array:
        """Quantiles of new targets, (n, t, q)."""

    def sample(self, f: Array, noise: float, generator: np.random.Generator) -> Array:
        """New targets (n, t, s) of drawn outputs (n, c, s)."""

    def log_density(
        self, mean: Tensor, variance: Tensor, y: Tensor, noise: float
    ) -> Tensor:
        """Log-probability of targets ``y`` (b, t), summed over columns, (b,)."""


@dataclass(frozen=True)
class DataFit:
    """How well the network fits the rows that made the curvature.

    Attributes
    ----------
    loss : Tensor of shape ()
        Sum over rows of weight times `Likelihood.loss`.
    n_targets : Tensor of shape ()
        Sum of weights times observed values per row.
    """

    loss: Tensor
    n_targets: Tensor


class BaseLikelihood:
    """What all likelihoods share: a root of the Hessian that they give."""

    hessian: Callable[[Tensor], OutputHessian]
    gradient: Callable[[Tensor, Tensor], Tensor]
    is_convex = True
    is_shift_invariant = False
    n_blocks = 1
    width: Callable[[int], int]
    options: ClassVar[frozenset[str]] = frozenset()

    def configured(self, criterion: nn.Module) -> Any:
        """The same with the options of a criterion."""
        return self

    def row_scale(self, y: Tensor) -> Tensor | None:
        """What the loss of a row is multiplied by, (b,), float64; None: one."""
        return None

    def label_weights(self, y: Tensor) -> Tensor | None:
        """What the loss of each label is multiplied by, (b, r), float64; None: one."""
        return None

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """Gradient of ``loss`` at drawn targets, (b, c)."""
        return self.gradient(f, y)

    def output_shape(self, n_targets: int) -> tuple[int, ...]:
        """One vector per row."""
        return (self.width(n_targets),)

    def hessian_factor(self, f: Tensor) -> Tensor:
        """``S`` (b, c, k) with ``S Sᵀ = Λ``."""
        return self.hessian(f).factor()


def weighted(
    likelihood: Likelihood, targets: Tensor, weights: Tensor | None
) -> Tensor | None:
    """Sample weights (b,), times what the criterion gives rows of their kind."""
    scale = likelihood.row_scale(targets)
    if scale is None:
        return weights
    return scale if weights is None else weights * scale.to(weights)


def output_weights(
    likelihood: Likelihood, targets: Tensor, n_outputs: int
) -> Tensor | None:
    """What the second derivatives in each output are multiplied by, (b, c)."""
    weights = likelihood.label_weights(targets)
    if weights is None:
        return None
    # the outputs of a label stand side by side
    return weights.repeat_interleave(n_outputs // weights.shape[1], 1)

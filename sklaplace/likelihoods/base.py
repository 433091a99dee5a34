"""Base class of likelihoods, and the weights that a criterion implies.

Every likelihood has the form
``log p(y | f) = -scale · loss(f, y) - log_normalizer`` per sample, where only
``scale`` and ``log_normalizer`` depend on the observation noise. The Hessian of
``loss`` in the outputs, ``Λ = S Sᵀ``, is therefore independent of the noise, which can
be tuned after the curvature has been accumulated.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sklaplace.likelihoods.output_hessian import Diagonal, OutputHessian

Weights = Tensor | None


class Likelihood(ABC):
    """Distribution of targets ``y`` given outputs ``f`` (b, c) of the network.

    To write one, derive it from `ClassificationLikelihood` or `RegressionLikelihood`.
    """

    is_classification: ClassVar[bool]
    """Whether targets are class labels."""
    noun: ClassVar[str]
    """What `n_outputs` counts, for messages: classes, labels or target columns."""
    options: ClassVar[frozenset[str]] = frozenset()
    """Arguments of the criterion that are supported at other values than defaults."""
    is_convex: ClassVar[bool] = True
    """Whether ``loss`` is convex in the outputs, so that a last layer can be refitted
    by Newton's method."""
    has_noise: ClassVar[bool] = False
    """Whether there is a noise parameter."""
    is_shift_invariant: ClassVar[bool] = False
    """Whether ``loss`` is invariant to a shift common to all outputs of a block."""

    @property
    def n_blocks(self) -> int:
        """Number of contiguous groups of outputs that are predicted independently."""
        return 1

    def configured(self, criterion: nn.Module) -> Any:
        """Copy of the likelihood with the options of a criterion."""
        return self

    @abstractmethod
    def targets(self, y: Tensor, f: Tensor) -> Tensor:
        """``y`` in the shape and dtype that ``loss`` takes."""

    def loss_scale(self, y: Tensor) -> Weights:
        """Factor of each sample's loss, (b,), float64; None: one."""
        return None

    def label_weights(self, y: Tensor) -> Weights:
        """Weight of each label of a sample, (b, r), float64; None: one.

        ``loss`` and ``gradient`` include it. ``hessian`` does not, as it takes no
        targets: see `output_weights`.
        """
        return None

    @abstractmethod
    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Loss per sample, (b,), in nats after multiplication by ``scale``."""

    def output_losses(self, f: Tensor, y: Tensor) -> Tensor | None:
        """Loss of each output, (b, c), for noise levels of their own; None without."""
        return None

    @abstractmethod
    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Gradient of ``loss`` in the outputs, (b, c)."""

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """Gradient at targets from `draw`, without weights and smoothing, (b, c)."""
        return self.gradient(f, y)

    @abstractmethod
    def hessian(self, f: Tensor) -> OutputHessian:
        """Hessian ``Λ`` of ``loss`` in the outputs, in closed form."""

    def hessian_factor(self, f: Tensor) -> Tensor:
        """``S`` (b, c, k) with ``S Sᵀ = Λ``."""
        return self.hessian(f).factor()

    @abstractmethod
    def hessian_operator(self, f: Tensor) -> Callable[[Tensor], Tensor]:
        """``u -> Λ u`` for (b, c), without the factor: O(b·c) time and memory."""

    def n_draws(self, n_outputs: int) -> int:
        """Uniform random numbers that `draw` takes per sample."""
        return self.n_targets(n_outputs)

    @abstractmethod
    def draw(self, f: Tensor, u: Tensor) -> Tensor:
        """Targets at unit scale, as `loss` takes them, for uniform ``u`` (b, n_draws).

        By inversion of the distribution function.
        """

    def scale(self, sigma_noise: Tensor) -> Tensor:
        """Factor from ``loss`` to negative log-likelihood; one without noise."""
        return torch.ones_like(sigma_noise)

    def log_normalizer(self, sigma_noise: Tensor) -> Tensor:
        """Part of the negative log-likelihood per observed value that has no outputs.

        Zero if ``loss`` is normalised.
        """
        return torch.zeros_like(sigma_noise)

    @abstractmethod
    def n_targets(self, n_outputs: int) -> int:
        """Number of observed values per sample."""

    def n_outputs(self, n_targets: int) -> int:
        """Number of outputs for so many classes, labels or target columns."""
        return n_targets

    def output_shape(self, n_targets: int) -> tuple[int, ...]:
        """Shape of the module's output per sample."""
        return (self.n_outputs(n_targets),)


class SeparableLikelihood(Likelihood):
    """Likelihood whose loss is a sum over outputs: ``Λ`` is diagonal."""

    @abstractmethod
    def root_hessian(self, f: Tensor) -> Tensor:
        """Square roots of the diagonal of ``Λ``, (b, c)."""

    def hessian(self, f: Tensor) -> OutputHessian:
        """Diagonal Hessian of ``loss`` in the outputs."""
        return Diagonal(self.root_hessian(f))

    def hessian_operator(self, f: Tensor) -> Callable[[Tensor], Tensor]:
        """``u -> Λ u`` for (b, c)."""
        diagonal = self.root_hessian(f) ** 2
        return lambda u: diagonal * u


@dataclass(frozen=True)
class DataFit:
    """Training loss of the network, over the data of the curvature.

    Attributes
    ----------
    loss : Tensor of shape ()
        Sum over samples of weight times `Likelihood.loss`.
    n_targets : Tensor of shape ()
        Sum of weights times observed values per sample.
    by_output : Tensor of shape (c,) or None
        The loss of each output, where the noise can have a level for each.
    """

    loss: Tensor
    n_targets: Tensor
    by_output: Tensor | None = None

    @classmethod
    def of(
        cls,
        likelihood: Likelihood,
        f: Tensor,
        targets: Tensor,
        weights: Tensor,
        n_targets: Tensor,
    ) -> "DataFit":
        """Loss of one batch with sample weights (b,)."""
        losses = likelihood.loss(f, targets)
        weights, each = weights.to(losses), likelihood.output_losses(f, targets)
        by_output = None if each is None else weights @ each
        return cls(weights @ losses, n_targets, by_output)

    @classmethod
    def total(cls, parts: Sequence["DataFit"]) -> "DataFit":
        """Loss of all parts."""
        each = [part.by_output for part in parts if part.by_output is not None]
        return cls(
            torch.stack([part.loss for part in parts]).sum(),
            torch.stack([part.n_targets for part in parts]).sum(),
            torch.stack(each).sum(0) if each else None,
        )

    def __add__(self, other: "DataFit") -> "DataFit":
        """Loss of both data sets."""
        return self.total([self, other])

    def with_output_factors(self, factors: Tensor) -> "DataFit":
        """Loss after that of each output was multiplied by a factor, (c,)."""
        assert self.by_output is not None
        by_output = self.by_output * factors
        return DataFit(by_output.sum(), self.n_targets, by_output)


def weighted(likelihood: Likelihood, targets: Tensor, weights: Weights) -> Weights:
    """Sample weights (b,) times the factors that the criterion implies; None: one."""
    scale = likelihood.loss_scale(targets)
    if scale is None:
        return weights
    return scale if weights is None else weights * scale.to(weights)


def output_weights(likelihood: Likelihood, targets: Tensor, n_outputs: int) -> Weights:
    """Weights of the second derivatives in each output, (b, c); None: one."""
    weights = likelihood.label_weights(targets)
    if weights is None:
        return None
    # the outputs of a label are contiguous
    return weights.repeat_interleave(n_outputs // weights.shape[1], 1)

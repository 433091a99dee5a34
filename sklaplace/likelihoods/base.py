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
from typing import ClassVar

import torch
from torch import Tensor, nn

from sklaplace.likelihoods.output_hessian import Diagonal, OutputHessian

Weights = Tensor | None


class Likelihood(ABC):
    """Distribution of targets ``y`` given outputs ``f`` (b, c) of the network.

    To write one, derive it from `ClassificationLikelihood` or `RegressionLikelihood`.

    Read more in the :doc:`User Guide </user_guide/networks>`.

    See Also
    --------
    ClassificationLikelihood : Base class for class labels.
    RegressionLikelihood : Base class for numbers.

    Examples
    --------
    >>> from sklaplace.likelihoods import CRITERIA, Likelihood
    >>> all(isinstance(likelihood, Likelihood) for likelihood, _ in CRITERIA.values())
    True
    """

    is_classification: ClassVar[bool]
    """Whether targets are class labels."""
    noun: ClassVar[str]
    """Noun for messages of what `n_outputs` counts: class, label or target column."""
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
        """Number of contiguous groups of outputs that are predicted independently.

        See Also
        --------
        n_outputs : Outputs of all groups.

        Examples
        --------
        >>> from sklaplace.likelihoods import CategoricalMap
        >>> CategoricalMap(positions=(4, 5)).n_blocks
        20
        """
        return 1

    def configured(self, criterion: nn.Module) -> "Likelihood":
        """Copy of the likelihood with the options of a criterion.

        Parameters
        ----------
        criterion : nn.Module
            Criterion of the skorch net.

        Returns
        -------
        Likelihood
            Itself, by default.

        See Also
        --------
        sklaplace.likelihoods.CRITERIA : The likelihood of each criterion.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Categorical
        >>> Categorical().configured(torch.nn.CrossEntropyLoss(label_smoothing=0.1))
        Categorical(weight=None, label_smoothing=0.1)
        """
        return self

    @abstractmethod
    def targets(self, y: Tensor, f: Tensor) -> Tensor:
        """Targets in the shape and dtype that `loss` takes.

        Parameters
        ----------
        y : Tensor
            Targets, as the net is given them.
        f : Tensor of shape (b, c)
            Outputs of the network.

        Returns
        -------
        Tensor
            With b samples.

        See Also
        --------
        loss : Takes them.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Gaussian
        >>> Gaussian().targets(torch.tensor([1, 2]), torch.zeros(2, 1)).shape
        torch.Size([2, 1])
        """

    def loss_scale(self, y: Tensor) -> Weights:
        """Factor of each sample's loss.

        Parameters
        ----------
        y : Tensor
            Targets, as `targets` returns them.

        Returns
        -------
        Tensor of shape (b,), or None
            Float64; None is one for all.

        See Also
        --------
        label_weights : Weights within a sample.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Bernoulli
        >>> Bernoulli(pos_weight=3.0).loss_scale(torch.tensor([[0.0], [1.0]])).tolist()
        [1.0, 3.0]
        """
        return None

    def label_weights(self, y: Tensor) -> Weights:
        """Weight of each label of a sample.

        `loss` and `gradient` include it. `hessian` does not, as it takes no targets.

        Parameters
        ----------
        y : Tensor
            Targets, as `targets` returns them.

        Returns
        -------
        Tensor of shape (b, r), or None
            Float64, for r labels; None is one for all.

        See Also
        --------
        loss_scale : Factors of whole samples.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import MultilabelBernoulli
        >>> y = torch.tensor([[0.0, 1.0]])
        >>> MultilabelBernoulli(pos_weight=(3.0,)).label_weights(y).tolist()
        [[1.0, 3.0]]
        """
        return None

    @abstractmethod
    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Loss per sample.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.
        y : Tensor
            Targets, as `targets` returns them.

        Returns
        -------
        Tensor of shape (b,)
            In nats after multiplication by `scale`.

        See Also
        --------
        gradient : Its gradient.
        hessian : Its second derivatives.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Bernoulli
        >>> f, y = torch.zeros(1, 1), torch.ones(1, 1)
        >>> Bernoulli().loss(f, y)  # log 2
        tensor([0.6931])
        """

    def output_losses(self, f: Tensor, y: Tensor) -> Tensor | None:
        """Loss of each output, for noise levels of their own.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.
        y : Tensor
            Targets, as `targets` returns them.

        Returns
        -------
        Tensor of shape (b, c), or None
            None, as by default, where they cannot have levels of their own.

        See Also
        --------
        loss : Their sum.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Gaussian
        >>> Gaussian().output_losses(torch.zeros(1, 2), torch.tensor([[1.0, 2.0]]))
        tensor([[0.5000, 2.0000]])
        """
        return None

    @abstractmethod
    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Gradient of `loss` in the outputs.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.
        y : Tensor
            Targets, as `targets` returns them.

        Returns
        -------
        Tensor of shape (b, c)
            Of the loss of each sample.

        See Also
        --------
        score : Without weights.
        hessian : Second derivatives.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Bernoulli
        >>> f, y = torch.zeros(1, 1), torch.ones(1, 1)
        >>> Bernoulli().gradient(f, y)
        tensor([[-0.5000]])
        """

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """Gradient at targets from `draw`, without weights and smoothing.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.
        y : Tensor
            Targets, as `targets` returns them.

        Returns
        -------
        Tensor of shape (b, c)
            Of the loss of each sample.

        See Also
        --------
        gradient : With weights and smoothing.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Categorical
        >>> f, y = torch.zeros(1, 2), torch.tensor([1])
        >>> Categorical(label_smoothing=0.1).score(f, y)
        tensor([[ 0.5000, -0.5000]])
        """
        return self.gradient(f, y)

    @abstractmethod
    def hessian(self, f: Tensor) -> OutputHessian:
        """Hessian ``Λ`` of `loss` in the outputs, in closed form.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.

        Returns
        -------
        OutputHessian
            One (c, c) matrix for each sample.

        See Also
        --------
        hessian_factor : A factor of it.
        hessian_operator : Products with it.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Categorical
        >>> f, y = torch.zeros(1, 2), torch.tensor([1])
        >>> Categorical().hessian(f).factor().shape
        torch.Size([1, 2, 1])
        """

    def hessian_factor(self, f: Tensor) -> Tensor:
        """Factor ``S`` of the Hessian, ``S Sᵀ = Λ``.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.

        Returns
        -------
        Tensor of shape (b, c, k)
            With k columns, as few as the rank allows.

        See Also
        --------
        hessian : The Hessian.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Categorical
        >>> f, y = torch.zeros(1, 2), torch.tensor([1])
        >>> root = Categorical().hessian_factor(f)
        >>> root @ root.mT
        tensor([[[ 0.2500, -0.2500],
                 [-0.2500,  0.2500]]])
        """
        return self.hessian(f).factor()

    @abstractmethod
    def hessian_operator(self, f: Tensor) -> Callable[[Tensor], Tensor]:
        """Products with the Hessian, without its factor.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.

        Returns
        -------
        callable
            From a Tensor ``u`` (b, c) to ``Λ u``, in O(b·c) time and memory.

        See Also
        --------
        hessian : The Hessian.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Categorical
        >>> f, y = torch.zeros(1, 2), torch.tensor([1])
        >>> Categorical().hessian_operator(f)(torch.tensor([[1.0, 0.0]]))
        tensor([[ 0.2500, -0.2500]])
        """

    def n_draws(self, n_outputs: int) -> int:
        """Number of uniform random numbers that `draw` takes per sample.

        Parameters
        ----------
        n_outputs : int
            Number of outputs, c.

        Returns
        -------
        int
            That of observed values, by default.

        See Also
        --------
        draw : Takes them.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Gaussian
        >>> Gaussian().n_draws(2)
        2
        """
        return self.n_targets(n_outputs)

    @abstractmethod
    def draw(self, f: Tensor, u: Tensor) -> Tensor:
        """Targets at unit scale, by inversion of the distribution function.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.
        u : Tensor of shape (b, n_draws)
            Uniform random numbers.

        Returns
        -------
        Tensor
            Targets, as `loss` takes them.

        See Also
        --------
        n_draws : How many random numbers that takes.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Bernoulli
        >>> f, y = torch.zeros(1, 1), torch.ones(1, 1)
        >>> Bernoulli().draw(f, torch.tensor([[0.3]]))
        tensor([[1.]])
        """

    def scale(self, sigma_noise: Tensor) -> Tensor:
        """Factor from `loss` to the negative log-likelihood.

        Parameters
        ----------
        sigma_noise : Tensor of shape ()
            Standard deviation of the noise.

        Returns
        -------
        Tensor of shape ()
            One for likelihoods without noise.

        See Also
        --------
        log_normalizer : The part without outputs.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Gaussian
        >>> Gaussian().scale(torch.tensor(0.5))
        tensor(4.)
        """
        return torch.ones_like(sigma_noise)

    def log_normalizer(self, sigma_noise: Tensor) -> Tensor:
        """Part of the negative log-likelihood that does not depend on the outputs.

        Parameters
        ----------
        sigma_noise : Tensor of shape ()
            Standard deviation of the noise.

        Returns
        -------
        Tensor of shape ()
            Per observed value, in nats; zero where `loss` is normalised.

        See Also
        --------
        scale : Factor of the other part.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Gaussian
        >>> Gaussian().log_normalizer(torch.tensor(1.0))  # log √(2π)
        tensor(0.9189)
        """
        return torch.zeros_like(sigma_noise)

    @abstractmethod
    def n_targets(self, n_outputs: int) -> int:
        """Number of observed values per sample.

        Parameters
        ----------
        n_outputs : int
            Number of outputs, c.

        Returns
        -------
        int
            One for class labels, and one per column of numbers.

        See Also
        --------
        n_outputs : The reverse.

        Examples
        --------
        >>> from sklaplace.likelihoods import HeteroscedasticGaussian
        >>> HeteroscedasticGaussian().n_targets(2)
        1
        """

    def n_outputs(self, n_targets: int) -> int:
        """Number of outputs that the network has to have.

        Parameters
        ----------
        n_targets : int
            Number of classes, labels or target columns.

        Returns
        -------
        int
            The same number, by default.

        See Also
        --------
        output_shape : The same with axes.

        Examples
        --------
        >>> from sklaplace.likelihoods import Bernoulli, HeteroscedasticGaussian
        >>> Bernoulli().n_outputs(2), HeteroscedasticGaussian().n_outputs(1)
        (1, 2)
        """
        return n_targets

    def output_shape(self, n_targets: int) -> tuple[int, ...]:
        """Shape of the module's output per sample.

        Parameters
        ----------
        n_targets : int
            Number of classes, labels or target columns.

        Returns
        -------
        tuple of int
            One axis, by default.

        See Also
        --------
        n_outputs : The number of entries.

        Examples
        --------
        >>> from sklaplace.likelihoods import CategoricalMap
        >>> CategoricalMap(positions=(4, 5)).output_shape(3)
        (3, 4, 5)
        """
        return (self.n_outputs(n_targets),)


class SeparableLikelihood(Likelihood):
    """Likelihood whose loss is a sum over outputs: ``Λ`` is diagonal.

    Read more in the :doc:`User Guide </user_guide/networks>`.

    See Also
    --------
    Likelihood : Of any form.

    Examples
    --------
    >>> from sklaplace.likelihoods import Poisson, SeparableLikelihood
    >>> isinstance(Poisson(), SeparableLikelihood)
    True
    """

    @abstractmethod
    def root_hessian(self, f: Tensor) -> Tensor:
        """Square roots of the diagonal of the Hessian, which has no other entries.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.

        Returns
        -------
        Tensor of shape (b, c)
            Not negative.

        See Also
        --------
        hessian : The Hessian.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Bernoulli
        >>> f, y = torch.zeros(1, 1), torch.ones(1, 1)
        >>> Bernoulli().root_hessian(f)  # √(p (1 - p))
        tensor([[0.5000]])
        """

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
        """Loss with the loss of each output multiplied by a factor, (c,)."""
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

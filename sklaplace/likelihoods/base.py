"""Base class of likelihoods, and the sample weights that a criterion implies.

Every likelihood has the form ``log p(y | f) = -scale · loss(f, y) - log_normalizer``
per sample. Only ``scale`` and ``log_normalizer`` depend on the observation noise. The
Hessian of ``loss`` with respect to the outputs, ``Λ = S Sᵀ``, does not depend on the
noise, so the noise can be tuned after the curvature has been computed.
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

    Custom likelihoods derive from `ClassificationLikelihood` or `RegressionLikelihood`.

    Read more in the :doc:`User Guide </user_guide/networks>`.

    See Also
    --------
    ClassificationLikelihood : Base class for class labels.
    RegressionLikelihood : Base class for numeric targets.

    Examples
    --------
    >>> from sklaplace.likelihoods import CRITERIA, Likelihood
    >>> all(isinstance(likelihood, Likelihood) for likelihood, _ in CRITERIA.values())
    True
    """

    is_classification: ClassVar[bool]
    """Whether targets are class labels."""
    noun: ClassVar[str]
    """Noun for the unit of `n_targets` in messages: class, label or target column."""
    options: ClassVar[frozenset[str]] = frozenset()
    """Arguments of the criterion that may differ from their defaults."""
    is_convex: ClassVar[bool] = True
    """Whether ``loss`` is convex in the outputs. Newton's method can then refit a last
    layer."""
    has_noise: ClassVar[bool] = False
    """Whether the likelihood has a noise parameter."""
    is_shift_invariant: ClassVar[bool] = False
    """Whether adding a constant to all outputs of a block leaves ``loss`` unchanged."""

    @property
    def n_blocks(self) -> int:
        """Number of contiguous groups of outputs that are predicted independently.

        See Also
        --------
        n_outputs : Number of outputs.

        Examples
        --------
        >>> from sklaplace.likelihoods import CategoricalMap
        >>> CategoricalMap(positions=(4, 5)).n_blocks
        20
        """
        return 1

    def configured(self, criterion: nn.Module) -> "Likelihood":
        """Return a copy of the likelihood with the options of a criterion.

        Parameters
        ----------
        criterion : nn.Module
            Criterion of the skorch net.

        Returns
        -------
        Likelihood
            By default, the likelihood itself.

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
        """Convert targets to the shape and dtype that `loss` expects.

        Parameters
        ----------
        y : Tensor
            Targets, as passed to the skorch net.
        f : Tensor of shape (b, c)
            Outputs of the network.

        Returns
        -------
        Tensor
            Converted targets of b samples.

        See Also
        --------
        loss : Loss of converted targets.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Gaussian
        >>> Gaussian().targets(torch.tensor([1, 2]), torch.zeros(2, 1)).shape
        torch.Size([2, 1])
        """

    def loss_scale(self, y: Tensor) -> Weights:
        """Return the factor that multiplies each sample's loss.

        For example, this is the weight of the sample's class. `loss`, `gradient` and
        `hessian` do not include the factor.

        Parameters
        ----------
        y : Tensor
            Targets, as `targets` returns them.

        Returns
        -------
        Tensor of shape (b,), or None
            Factors, float64. None means a factor of one for all samples.

        See Also
        --------
        label_weights : Weights of labels.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Bernoulli
        >>> Bernoulli(pos_weight=3.0).loss_scale(torch.tensor([[0.0], [1.0]])).tolist()
        [1.0, 3.0]
        """
        return None

    def label_weights(self, y: Tensor) -> Weights:
        """Return the weight of each label of a sample.

        `loss` and `gradient` include these weights. `hessian` does not, because the
        Hessian is independent of the targets.

        Parameters
        ----------
        y : Tensor
            Targets, as `targets` returns them.

        Returns
        -------
        Tensor of shape (b, r), or None
            Weights for r labels, float64. None means a weight of one for all labels.

        See Also
        --------
        loss_scale : Factor per sample.

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
        """Return the loss per sample.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.
        y : Tensor
            Targets, as `targets` returns them.

        Returns
        -------
        Tensor of shape (b,)
            Losses. The product of a loss and `scale` is in nats.

        See Also
        --------
        gradient : Gradient of the loss.
        hessian : Second derivatives of the loss.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Bernoulli
        >>> f, y = torch.zeros(1, 1), torch.ones(1, 1)
        >>> Bernoulli().loss(f, y)  # log 2
        tensor([0.6931])
        """

    def output_losses(self, f: Tensor, y: Tensor) -> Tensor | None:
        """Return the loss of each output, to estimate one noise level per output.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.
        y : Tensor
            Targets, as `targets` returns them.

        Returns
        -------
        Tensor of shape (b, c), or None
            Losses. None, the default, means that all outputs share one noise level.

        See Also
        --------
        loss : Sum of these losses.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Gaussian
        >>> Gaussian().output_losses(torch.zeros(1, 2), torch.tensor([[1.0, 2.0]]))
        tensor([[0.5000, 2.0000]])
        """
        return None

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of `loss` with respect to the outputs, by autograd.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.
        y : Tensor
            Targets, as `targets` returns them.

        Returns
        -------
        Tensor of shape (b, c)
            Gradient for each sample.

        See Also
        --------
        score : Gradient without weights.
        hessian : Second derivatives.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Bernoulli
        >>> f, y = torch.zeros(1, 1), torch.ones(1, 1)
        >>> Bernoulli().gradient(f, y)
        tensor([[-0.5000]])
        """
        gradient_at = torch.func.grad(lambda f: self.loss(f.clone(), y).sum())
        gradient: Tensor = gradient_at(f)
        return gradient

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient for drawn targets, without weights or label smoothing.

        The mean outer product of these gradients over draws from `draw` estimates the
        Fisher information, which equals `hessian`.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.
        y : Tensor
            Targets, as `targets` returns them.

        Returns
        -------
        Tensor of shape (b, c)
            Gradient for each sample.

        See Also
        --------
        gradient : Gradient with weights and smoothing.

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
        """Return the Hessian ``Λ`` of `loss` with respect to the outputs.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.

        Returns
        -------
        OutputHessian
            One (c, c) matrix per sample, in closed form.

        See Also
        --------
        hessian_factor : Factor of the Hessian.
        hessian_operator : Products with the Hessian.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Categorical
        >>> f, y = torch.zeros(1, 2), torch.tensor([1])
        >>> Categorical().hessian(f).factor().shape
        torch.Size([1, 2, 1])
        """

    def hessian_factor(self, f: Tensor) -> Tensor:
        """Return a factor ``S`` of the Hessian, with ``S Sᵀ = Λ``.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.

        Returns
        -------
        Tensor of shape (b, c, k)
            Factors with the minimum number of columns, k.

        See Also
        --------
        hessian : Full Hessian.

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
        """Return a function that computes products with the Hessian.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.

        Returns
        -------
        callable
            Maps a Tensor ``u`` (b, c) to ``Λ u``, in O(b·c) time and memory.

        See Also
        --------
        hessian : Full Hessian.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Categorical
        >>> f, y = torch.zeros(1, 2), torch.tensor([1])
        >>> Categorical().hessian_operator(f)(torch.tensor([[1.0, 0.0]]))
        tensor([[ 0.2500, -0.2500]])
        """

    def n_draws(self, n_outputs: int) -> int:
        """Return the number of uniform random numbers that `draw` uses per sample.

        Parameters
        ----------
        n_outputs : int
            Number of outputs, c.

        Returns
        -------
        int
            By default, the number of observed values.

        See Also
        --------
        draw : Draws of targets.

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
        """Draw targets for ``scale = 1``, by inverting the distribution function.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.
        u : Tensor of shape (b, n_draws)
            Uniform random numbers.

        Returns
        -------
        Tensor
            Targets, as `loss` expects them.

        See Also
        --------
        n_draws : Number of random numbers.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Bernoulli
        >>> f, y = torch.zeros(1, 1), torch.ones(1, 1)
        >>> Bernoulli().draw(f, torch.tensor([[0.3]]))
        tensor([[1.]])
        """

    def scale(self, sigma_noise: Tensor) -> Tensor:
        """Return the factor that multiplies `loss` in the negative log-likelihood.

        Parameters
        ----------
        sigma_noise : Tensor of shape ()
            Standard deviation of the noise.

        Returns
        -------
        Tensor of shape ()
            Factor, which is one for likelihoods without noise.

        See Also
        --------
        log_normalizer : Term that does not depend on the outputs.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Gaussian
        >>> Gaussian().scale(torch.tensor(0.5))
        tensor(4.)
        """
        return torch.ones_like(sigma_noise)

    def log_normalizer(self, sigma_noise: Tensor) -> Tensor:
        """Return the output-independent term of the negative log-likelihood.

        Parameters
        ----------
        sigma_noise : Tensor of shape ()
            Standard deviation of the noise.

        Returns
        -------
        Tensor of shape ()
            Term per observed value, in nats. The term is zero if `loss` is normalised.

        See Also
        --------
        scale : Factor of the loss.

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
        """Return the number of observed values per sample.

        Parameters
        ----------
        n_outputs : int
            Number of outputs, c.

        Returns
        -------
        int
            One for class labels, or the number of target columns for numeric targets.

        See Also
        --------
        n_outputs : Number of outputs.

        Examples
        --------
        >>> from sklaplace.likelihoods import HeteroscedasticGaussian
        >>> HeteroscedasticGaussian().n_targets(2)
        1
        """

    def n_outputs(self, n_targets: int) -> int:
        """Return the required number of network outputs.

        Parameters
        ----------
        n_targets : int
            Number of classes, labels or target columns.

        Returns
        -------
        int
            By default, ``n_targets``.

        See Also
        --------
        output_shape : Shape of the outputs.

        Examples
        --------
        >>> from sklaplace.likelihoods import Bernoulli, HeteroscedasticGaussian
        >>> Bernoulli().n_outputs(2), HeteroscedasticGaussian().n_outputs(1)
        (1, 2)
        """
        return n_targets

    def output_shape(self, n_targets: int) -> tuple[int, ...]:
        """Return the shape of the module's output for one sample.

        Parameters
        ----------
        n_targets : int
            Number of classes, labels or target columns.

        Returns
        -------
        tuple of int
            By default, one axis of length `n_outputs`.

        See Also
        --------
        n_outputs : Number of entries.

        Examples
        --------
        >>> from sklaplace.likelihoods import CategoricalMap
        >>> CategoricalMap(positions=(4, 5)).output_shape(3)
        (3, 4, 5)
        """
        return (self.n_outputs(n_targets),)


class SeparableLikelihood(Likelihood):
    """Likelihood whose loss is a sum over outputs, so ``Λ`` is diagonal.

    Read more in the :doc:`User Guide </user_guide/networks>`.

    See Also
    --------
    Likelihood : General base class.

    Examples
    --------
    >>> from sklaplace.likelihoods import Poisson, SeparableLikelihood
    >>> isinstance(Poisson(), SeparableLikelihood)
    True
    """

    @abstractmethod
    def root_hessian(self, f: Tensor) -> Tensor:
        """Return the square roots of the Hessian's diagonal entries.

        Parameters
        ----------
        f : Tensor of shape (b, c)
            Outputs of the network.

        Returns
        -------
        Tensor of shape (b, c)
            Square roots, non-negative.

        See Also
        --------
        hessian : Full Hessian.

        Examples
        --------
        >>> import torch
        >>> from sklaplace.likelihoods import Bernoulli
        >>> f, y = torch.zeros(1, 1), torch.ones(1, 1)
        >>> Bernoulli().root_hessian(f)  # √(p (1 - p))
        tensor([[0.5000]])
        """

    def hessian(self, f: Tensor) -> OutputHessian:
        """Return the diagonal Hessian of ``loss`` with respect to the outputs."""
        return Diagonal(self.root_hessian(f))

    def hessian_operator(self, f: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function ``u -> Λ u`` for ``u`` of shape (b, c)."""
        diagonal = self.root_hessian(f) ** 2
        return lambda u: diagonal * u


@dataclass(frozen=True)
class DataFit:
    """Training loss of the network on the samples used for the curvature.

    Attributes
    ----------
    loss : Tensor of shape ()
        Weighted sum of `Likelihood.loss` over samples.
    n_targets : Tensor of shape ()
        Weighted number of observed values.
    by_output : Tensor of shape (c,) or None
        Loss of each output, or None if outputs cannot have separate noise levels.
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
        """Return the loss of one batch with outputs (b, c) and sample weights (b,).

        ``n_targets`` is the weighted number of observed values in the batch.
        """
        losses = likelihood.loss(f, targets)  # (b,)
        output_losses = likelihood.output_losses(f, targets)  # (b, c) or None
        weights = weights.to(losses)
        by_output = None if output_losses is None else weights @ output_losses  # (c,)
        return cls(weights @ losses, n_targets, by_output)

    @classmethod
    def total(cls, fits: Sequence["DataFit"]) -> "DataFit":
        """Return the total training loss of several batches."""
        # all batches have losses by output, or none
        by_output = [fit.by_output for fit in fits if fit.by_output is not None]
        return cls(
            torch.stack([fit.loss for fit in fits]).sum(),
            torch.stack([fit.n_targets for fit in fits]).sum(),
            torch.stack(by_output).sum(0) if by_output else None,
        )

    def __add__(self, other: "DataFit") -> "DataFit":
        """Return the total training loss of two data sets."""
        return self.total([self, other])

    def with_output_factors(self, factors: Tensor) -> "DataFit":
        """Multiply the loss of each output by a factor, (c,)."""
        assert self.by_output is not None
        by_output = self.by_output * factors
        return DataFit(by_output.sum(), self.n_targets, by_output)


def loss_weights(likelihood: Likelihood, targets: Tensor, weights: Weights) -> Weights:
    """Return sample weights times the criterion's factors, (b,), or None for ones.

    The factors, such as class weights, are those of `Likelihood.loss_scale`.
    """
    scale = likelihood.loss_scale(targets)
    if scale is None:
        return weights
    return scale if weights is None else weights * scale.to(weights)


def loss_weights_or_ones(
    likelihood: Likelihood, targets: Tensor, weights: Weights, f: Tensor
) -> Tensor:
    """Return the weights of `loss_weights`, (b,), with explicit ones instead of None.

    The ones have the dtype and device of the outputs ``f`` (b, c).
    """
    loss_factors = loss_weights(likelihood, targets, weights)
    return torch.ones_like(f[:, 0]) if loss_factors is None else loss_factors


def losses_by_output(likelihood: Likelihood, f: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each group of outputs with its own noise level.

    There is one column per output, (b, c), or a single column with the sum over
    outputs, (b, 1), if all outputs share one noise level.
    """
    losses = likelihood.output_losses(f, targets)
    return likelihood.loss(f, targets).unsqueeze(1) if losses is None else losses


def output_weights(likelihood: Likelihood, targets: Tensor, n_outputs: int) -> Weights:
    """Return the weight of each output's label, (b, c), or None for ones.

    `Likelihood.hessian` does not include these weights, so callers multiply it by them.
    """
    label_weights = likelihood.label_weights(targets)  # (b, r) for r labels
    if label_weights is None:
        return None
    # each label has n_outputs / r outputs, which are contiguous
    return label_weights.repeat_interleave(n_outputs // label_weights.shape[1], 1)

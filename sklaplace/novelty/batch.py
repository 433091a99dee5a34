"""FeatureBatch: features of samples, and other values that determine novelty."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.trees import leaves
from sklaplace.likelihoods import ClassificationLikelihood, Likelihood
from sklaplace.novelty.leverage import FeatureMoments, sketched

# Maximum number of training samples kept for comparison.
MAX_KEPT = 256
# Maximum number of input values. Inputs with more values are hashed.
MAX_INPUTS = 256
# Maximum number of feature sums of all classes. These 32 MiB are copied for each batch.
MAX_SUMS = 2**22
# Largest magnitude of `logit_terms`, so that even infinite logits have finite moments.
_LARGEST = 1e6


def logit_terms(logits: Tensor) -> Tensor:
    """Return indecision and energy, (b, 2), of logits (b, labels, K).

    The indecision is the mean log-probability over all classes. The energy is minus the
    logarithm of the sum of the exponentials of the logits.
    """
    energy = -logits.logsumexp(2)
    terms = torch.stack([logits.mean(2) + energy, energy], -1).mean(1)
    return terms.double().clamp(min=-_LARGEST, max=_LARGEST)


def input_shape(x: object) -> tuple[int, ...]:
    """Return the shape of a sample's inputs if they are an array of real numbers.

    Return an empty tuple if the inputs are not one array with two axes (a table) or
    with four or more (images). Arrays with three axes can be sequences, whose lengths
    may differ between batches.
    """
    first, *rest = leaves(x)
    if rest or not isinstance(first, Tensor) or first.ndim in (0, 1, 3):
        return ()
    return tuple(first.shape[1:]) if first.is_floating_point() else ()


def check_input_shape(x: object, expected: tuple[int, ...]) -> None:
    """Raise ValueError if inputs have another shape than expected, if any.

    ``expected`` is the `input_shape` of the training samples. If it is empty, novelty
    does not depend on the inputs, and all inputs are accepted.
    """
    shape = input_shape(x)
    if expected and shape != expected:
        raise ValueError(
            f"The inputs of X must be real numbers of shape {expected} per sample, as "
            f"in fit, but have {f'the shape {shape}' if shape else 'another type'}. "
            "Their distance from the training samples is unknown. Pass X in the same "
            "format as in fit. Only predictions with residual='none' accept others."
        )


def hashed_inputs(x: object) -> Tensor:
    """Return the inputs, which are one array, as hashed rows (b, d)."""
    return sketched(next(leaves(x)).flatten(1), MAX_INPUTS)


@dataclass(frozen=True)
class FeatureBatch:
    """Features of samples, and other values that determine the samples' novelty.

    Attributes
    ----------
    features : Tensor of shape (b, i)
        Last-layer features.
    groups : Tensor of shape (b,)
        Most probable class, or zero if there is a single group.
    n_groups : int
        Number of groups. Each class is a group, except if there are several labels or
        if the feature sums of all classes take up too much memory.
    logit_terms : Tensor of shape (b, 2) or (b, 0)
        Indecision and energy, for classification; see `logit_terms`.
    weights : Tensor of shape (b,)
        Sample weights, float64.
    keys : Tensor of shape (b,)
        Hashes of the samples' inputs.
    targets : Tensor of shape (b, c) or (b, 0)
        Targets, if the likelihood has a noise level.
    inputs : Tensor of shape (b, d) or (b, 0)
        Inputs of the network, hashed, if they are an array of real numbers.
    input_shape : tuple of int
        Shape of a sample's inputs, or an empty tuple without ``inputs``.
    """

    features: Tensor
    groups: Tensor
    n_groups: int
    logit_terms: Tensor
    weights: Tensor
    keys: Tensor
    targets: Tensor
    inputs: Tensor
    input_shape: tuple[int, ...]

    @classmethod
    def of(
        cls,
        likelihood: Likelihood,
        features: Tensor,
        f: Tensor,
        x: object,
        *,
        weights: Tensor | None = None,
        keys: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> "FeatureBatch":
        """Return a batch of features (b, i), outputs (b, c) and inputs ``x``.

        Large features and inputs are hashed to fewer columns. For classification,
        predicted classes are groups, and the logits yield indecision and energy.
        """
        features, shape = sketched(features), input_shape(x)
        inputs = hashed_inputs(x) if shape else features[:, :0]
        # in regression, all samples are in one group, and there are no logits
        groups, n_groups = torch.zeros_like(f[:, 0], dtype=torch.long), 1
        terms = no_columns = f[:, :0].double()
        b = f.shape[0]  # a symbol in torch.export, unlike len(f)
        if isinstance(likelihood, ClassificationLikelihood):
            # one logit per class; the variances of the outputs do not matter here
            logits, _ = likelihood.class_logits(f, torch.zeros_like(f))
            n_classes = logits.shape[1]
            n_sums = n_classes * max(features.shape[1], MAX_INPUTS)
            # with r labels per sample, there are b·r rows, and no single class
            if logits.shape[0] == b and n_sums <= MAX_SUMS:
                groups, n_groups = logits.argmax(1), n_classes
            terms = logit_terms(logits.reshape(b, -1, n_classes))
        if targets is None or not likelihood.has_noise:
            targets = no_columns
        return cls(
            features=features,
            groups=groups,
            n_groups=n_groups,
            logit_terms=terms,
            weights=(torch.ones_like(groups) if weights is None else weights).double(),
            keys=torch.zeros_like(groups) if keys is None else keys.to(groups),
            targets=targets.double(),
            inputs=inputs,
            input_shape=shape,
        )

    def moments(self, name: str) -> FeatureMoments:
        """Return the moments of the ``features`` or ``inputs``."""
        rows = getattr(self, name)
        return FeatureMoments.of(rows, self.groups, self.weights, self.n_groups)

    def without_inputs(self) -> "FeatureBatch":
        """Return the samples without inputs."""
        return replace(self, inputs=self.inputs[:, :0], input_shape=())

    def joined(self, other: "FeatureBatch") -> "FeatureBatch":
        """Return the samples of both batches."""
        tensors: Any = {
            name: torch.cat([tensor, getattr(other, name)])
            for name, tensor in self._tensors.items()
        }
        return replace(self, **tensors)

    def subsample(self) -> "FeatureBatch":
        """Return the samples with the smallest hashes; merge those with equal hashes.

        If there are at most `MAX_KEPT` samples, return all of them. The choice does not
        depend on the order of the samples. Merged samples have the sum of the weights.
        """
        if len(self.keys) <= MAX_KEPT:
            return self
        # distinct hashes in ascending order, and the number of each sample's hash
        keys, numbers = self.keys.unique(return_inverse=True)
        totals = self.weights.new_zeros(len(keys)).index_add(0, numbers, self.weights)
        # index of the first sample with each distinct hash
        order = torch.arange(len(numbers), device=numbers.device)
        first = torch.full_like(keys, len(numbers))
        first = first.scatter_reduce(0, numbers, order, "amin")[:MAX_KEPT]
        tensors: Any = {name: tensor[first] for name, tensor in self._tensors.items()}
        return replace(self, **(tensors | {"weights": totals[:MAX_KEPT]}))

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}

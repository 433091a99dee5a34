"""FeatureBatch: features of samples, and other values that determine novelty."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.trees import leaves
from sklaplace.likelihoods import ClassificationLikelihood, Likelihood
from sklaplace.novelty.leverage import MAX_FEATURES, sketched

# Maximum number of training samples kept for comparison.
MAX_KEPT = 256
# Maximum number of input values. Inputs with more values are hashed.
MAX_INPUTS = 256
# Maximum number of feature sums of all classes. These 32 MiB are copied for each batch.
MAX_SUMS = 2**22
# Largest magnitude of `logit_terms`.
_LARGEST = 1e6


def class_logits(
    likelihood: ClassificationLikelihood, f: Tensor, features: Tensor
) -> tuple[Tensor, int]:
    """Return the logits (b, labels, K) and the number of groups.

    Each class is a group, and features (b, i) are compared with the predicted class.
    There is a single group if there are several labels or if the feature sums of all
    classes take up too much memory.
    """
    logits, _ = likelihood.class_logits(f, torch.zeros_like(f))
    logits = logits.reshape(len(f), -1, logits.shape[1])
    _, n_labels, n_classes = logits.shape
    n_numbers = n_classes * max(min(features.shape[1], MAX_FEATURES), MAX_INPUTS)
    return logits, n_classes if n_labels == 1 and n_numbers <= MAX_SUMS else 1


def logit_terms(logits: Tensor) -> Tensor:
    """Return indecision and energy, (b, 2), of logits (b, labels, K).

    The indecision is the mean log-probability over all classes. The energy is minus the
    logarithm of the sum of the exponentials of the logits.
    """
    energy = -logits.logsumexp(2)
    terms = torch.stack([logits.mean(2) + energy, energy], -1).mean(1)
    return terms.double().clamp(min=-_LARGEST, max=_LARGEST)


def hashed_inputs(x: object) -> tuple[Tensor | None, tuple[int, ...]]:
    """Return the inputs as hashed rows (b, d), and the shape of a sample's inputs.

    Return None and an empty shape if the inputs are not one array of real numbers, with
    two axes (a table) or with four or more (images). Arrays with three axes can be
    sequences, whose lengths may differ between batches.
    """
    first, *rest = leaves(x)
    if rest or not isinstance(first, Tensor) or first.ndim in (0, 1, 3):
        return None, ()
    if not first.is_floating_point():
        return None, ()
    return sketched(first.flatten(1), MAX_INPUTS), tuple(first.shape[1:])


def check_input_shape(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise ValueError if inputs have another shape than expected, if any."""
    if expected and shape != expected:
        raise ValueError(
            f"The inputs of X must be real numbers of shape {expected} per sample, as "
            f"in fit, but have {f'the shape {shape}' if shape else 'another type'}. "
            "Their distance from the training samples is unknown. Pass X in the same "
            "format as in fit. Only predictions with residual='none' accept others."
        )


@dataclass(frozen=True)
class FeatureBatch:
    """Features of samples, and other values that determine the samples' novelty.

    Attributes
    ----------
    features : Tensor of shape (b, i)
        Last-layer features.
    groups : Tensor of shape (b,)
        Most probable class, or zero if there is a single group; see `class_logits`.
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
    logit_terms: Tensor
    weights: Tensor
    keys: Tensor
    targets: Tensor
    inputs: Tensor
    input_shape: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        likelihood: Likelihood,
        features: Tensor,
        f: Tensor,
        weights: Tensor | None = None,
        keys: Tensor | None = None,
        x: object = None,
        targets: Tensor | None = None,
    ) -> "FeatureBatch":
        """Build a batch from features (b, i), outputs (b, c), inputs and targets."""
        groups = torch.zeros(len(f), dtype=torch.long, device=f.device)
        none = torch.zeros(len(f), 0, dtype=torch.float64, device=f.device)
        terms, (inputs, shape) = none, hashed_inputs(x)
        if isinstance(likelihood, ClassificationLikelihood):
            logits, n_groups = class_logits(likelihood, f, features)
            if n_groups > 1:
                groups = logits[:, 0].argmax(1)
            terms = logit_terms(logits)
        has_targets = targets is not None and likelihood.has_noise
        return cls(
            features=sketched(features),
            groups=groups,
            logit_terms=terms,
            weights=(torch.ones_like(groups) if weights is None else weights).double(),
            keys=torch.zeros_like(groups) if keys is None else keys.to(groups),
            targets=targets.double() if targets is not None and has_targets else none,
            inputs=features[:, :0] if inputs is None else inputs,
            input_shape=shape,
        )

    def joined(self, other: "FeatureBatch") -> "FeatureBatch":
        """Return the samples of both batches."""
        pairs = {k: [v, getattr(other, k)] for k, v in self._tensors.items()}
        tensors: Any = {k: torch.cat(pair) for k, pair in pairs.items()}
        return replace(self, **tensors)

    def kept(self) -> "FeatureBatch":
        """Keep the samples with the smallest hashes; merge those with equal hashes."""
        if len(self.keys) <= MAX_KEPT:
            return self
        keys, places = self.keys.unique(return_inverse=True)
        order = torch.arange(len(places), device=places.device)
        first = torch.full_like(keys, len(places))
        first = first.scatter_reduce(0, places, order, "amin")[:MAX_KEPT]
        totals = self.weights.new_zeros(len(keys)).index_add(0, places, self.weights)
        taken: Any = {k: v[first] for k, v in self._tensors.items()}
        return replace(self, **(taken | {"weights": totals[:MAX_KEPT]}))

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}

"""Steepness of the residual: powers of tail probabilities, and the choice of one."""

from collections.abc import Sequence

from torch import Tensor

from sklaplace.likelihoods import Likelihood

# Powers for unusual samples to choose from, for classes and for numbers. In
# regression, larger powers would widen intervals near the data.
STEEPNESSES_CLASSES = 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0
STEEPNESSES_NUMBERS = 0.5, 0.75, 1.0, 1.25
# Largest difference between the chosen and the best mean loss, in nats per sample.
TOLERANCE = 0.0025
# With fewer samples than this, the mean loss is more uncertain. The tolerance of the
# sum over the samples is then constant.
FEW_SAMPLES = 100


def steepnesses(likelihood: Likelihood) -> tuple[float, ...]:
    """Return the values of the steepness to choose from, in ascending order."""
    is_classes = likelihood.is_classification
    return STEEPNESSES_CLASSES if is_classes else STEEPNESSES_NUMBERS


def largest_within_tolerance(
    losses: Tensor, weights: Tensor, steepnesses: Sequence[float]
) -> float:
    """Return the largest steepness whose mean loss is close to the best.

    The steepness is the power by which the variance of the `Residual` grows with
    distance from the training samples. Held-out samples are rarely far away, so the
    largest value that does not harm them is chosen.

    Parameters
    ----------
    losses : Tensor of shape (n, m)
        Losses of n held-out samples for m values of the steepness.
    weights : Tensor of shape (n,)
        Sample weights.
    steepnesses : sequence of float
        The m values.
    """
    # effective number of samples (Kish 1965), which is n for equal weights
    n_effective = weights.sum() ** 2 / (weights**2).sum()
    tolerance = TOLERANCE * (FEW_SAMPLES / n_effective).clamp(min=1)
    means = weights @ losses / weights.sum()
    is_close = (means <= means.min() + tolerance).tolist()
    return max(a for a, close in zip(steepnesses, is_close, strict=True) if close)

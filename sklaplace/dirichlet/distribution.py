"""Dirichlet distributions: what concentrations ``α``, of total ``A``, say."""

from typing import Any

import numpy as np
import torch
from scipy.special import betaincinv
from torch import Tensor

from sklaplace.core.checks import (
    as_seed,
    check_count,
    check_fraction,
    check_option,
)
from sklaplace.dirichlet.arrays import (
    MIN_CONCENTRATION,
    Array,
    check_alpha,
    check_proba,
    like,
)

# What concentrations of one class are compared with; see `plausible_classes`.
REFERENCES = ("top", "previous")
# Totals of which Beta quantiles are asked; larger ones differ by less than 1e-6.
_MAX_OF_QUANTILES = 1e12


def mean(alpha: Array) -> Array:
    """Class probabilities expected under a Dirichlet.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.

    Returns
    -------
    Tensor or ndarray of shape (..., K)
        ``α / A`` with the total ``A = Σ_k α_k``, float64.

    Raises
    ------
    ValueError
        If a concentration is not positive.
    """
    concentrations = check_alpha(alpha)
    return like(concentrations / concentrations.sum(-1, keepdim=True), alpha)


def variance(alpha: Array) -> Array:
    """Marginal variances of the class probabilities of a Dirichlet.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.

    Returns
    -------
    Tensor or ndarray of shape (..., K)
        Variances (not standard deviations) ``m (1 − m) / (A + 1)`` with
        ``m = α / A``, float64.

    Raises
    ------
    ValueError
        If a concentration is not positive.
    """
    concentrations = check_alpha(alpha)
    total = concentrations.sum(-1, keepdim=True)
    expected = concentrations / total
    return like(expected * (1 - expected) / (total + 1), alpha)


def entropy(alpha: Array) -> Array:
    """Differential entropy of a Dirichlet, in nats.

    How concentrated the distribution over probabilities is, whatever class they
    favour; negative for all but flat ones. For the entropy of the label, see
    `expected_entropy`.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.

    Returns
    -------
    Tensor or ndarray of shape (...,)
        ``Σ logΓ(α_k) − logΓ(A) + (A − K) ψ(A) − Σ (α_k − 1) ψ(α_k)``, float64.

    Raises
    ------
    ValueError
        If a concentration is not positive.
    """
    a = check_alpha(alpha)
    total = a.sum(-1)
    found = (
        _log_beta(a)
        + (total - a.shape[-1]) * total.digamma()
        - ((a - 1) * a.digamma()).sum(-1)
    )
    return like(found, alpha)


def expected_entropy(alpha: Array) -> Array:
    """Entropy of the label that is left when its probabilities are known, in nats.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.

    Returns
    -------
    Tensor or ndarray of shape (...,)
        ``E[−Σ π_k log π_k] = ψ(A + 1) − Σ (α_k / A) ψ(α_k + 1)``, float64, from zero to
        ``log K``.

    Raises
    ------
    ValueError
        If a concentration is not positive.
    """
    a = check_alpha(alpha)
    total = a.sum(-1, keepdim=True)
    terms = a / total * ((total + 1).digamma() - (a + 1).digamma())
    return like(terms.sum(-1), alpha)


def log_density(alpha: Array, proba: Array) -> Array:
    """Logarithm of the density of a Dirichlet at class probabilities.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.
    proba : Tensor or ndarray of shape (..., K)
        Probabilities, which sum to one; leading axes are broadcast.

    Returns
    -------
    Tensor or ndarray of shape (...,)
        With respect to volume in the first K − 1 probabilities; float64. Where a
        probability is zero: ``-inf``, or ``inf`` if its concentration is below one;
        ``nan`` where both meet, and the density has no limit.

    Raises
    ------
    ValueError
        If a concentration is not positive, or ``proba`` are no probabilities.
    """
    a = check_alpha(alpha)
    p = check_proba(proba, a)
    found = torch.special.xlogy(a - 1, p).sum(-1) - _log_beta(a)
    return like(found, alpha)


def interval(alpha: Array, coverage: float = 0.9) -> Array:
    """Central intervals that hold a class probability with given probability.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.
    coverage : float, default=0.9
        Probability in (0, 1), of each class alone.

    Returns
    -------
    Tensor or ndarray of shape (..., K, 2)
        Lower and upper ends: quantiles of the marginal ``Beta(α_k, A − α_k)``, float64.

    Raises
    ------
    ValueError
        If a concentration is not positive, or the coverage no probability.

    Notes
    -----
    Quantiles come from scipy, on the CPU: about a microsecond each.
    """
    check_fraction("coverage", coverage, "Choose a probability, such as 0.9.")
    a = check_alpha(alpha)
    tail = (1 - float(coverage)) / 2
    ends = [_marginal_quantile(a, a.sum(-1, keepdim=True), q) for q in (tail, 1 - tail)]
    return like(torch.stack(ends, -1), alpha)


def sample(alpha: Array, n_samples: int = 1, random_state: Any = 0) -> Array:
    """Class probabilities drawn from a Dirichlet.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.
    n_samples : int, default=1
        Number of draws.
    random_state : int, RandomState or None, default=0
        Seeds the draws; None differs every time. Global generators are not touched.

    Returns
    -------
    Tensor or ndarray of shape (n_samples, ..., K)
        Rows sum to one; float64. Drawn on the CPU.

    Raises
    ------
    ValueError
        If a concentration is not positive, or there is nothing to draw.

    Notes
    -----
    Gamma draws, taken as logarithms, so that small concentrations give one-hot
    probabilities and not zeros divided by zero.
    """
    check_count("n_samples", n_samples)
    a = check_alpha(alpha)
    generator = torch.Generator().manual_seed(as_seed("random_state", random_state))
    shapes = a.detach().cpu().expand(n_samples, *a.shape).contiguous()
    # G(α) = G(α + 1) U^(1/α): Marsaglia and Tsang (2000), section 6
    gamma = torch._standard_gamma(shapes + 1, generator=generator)
    uniform = torch.rand(shapes.shape, dtype=shapes.dtype, generator=generator)
    logs = gamma.log() + uniform.clamp(min=2**-60).log() / shapes
    return like(logs.softmax(-1).to(a.device), alpha)


def uncertainty(alpha: Array) -> Array:
    """Split the entropy of a label into what data could remove and the rest.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.

    Returns
    -------
    Tensor or ndarray of shape (..., 3)
        In nats, float64: the entropy of the mean (total), the `expected_entropy`
        (aleatoric: the label stays uncertain though its probabilities are known), and
        their difference, the mutual information of label and probabilities (epistemic).

    Raises
    ------
    ValueError
        If a concentration is not positive.

    References
    ----------
    Depeweg, Hernández-Lobato, Doshi-Velez and Udluft (2018), "Decomposition of
    uncertainty in Bayesian deep learning for efficient and risk-sensitive learning".
    """
    a = check_alpha(alpha)
    return like(split_entropy(mean(a), expected_entropy(a)), alpha)


def split_entropy(average: Tensor, aleatoric: Tensor) -> Tensor:
    """Total, aleatoric and epistemic entropy, (..., 3).

    From mean probabilities (..., K), and entropies on average (...).
    """
    total = -torch.special.xlogy(average, average).sum(-1)
    aleatoric = torch.minimum(aleatoric, total)  # up to rounding
    # zero has no sign
    return torch.stack([total, aleatoric, total - aleatoric], -1) + 0.0


def plausible_classes(
    alpha: Array, q: float = 0.05, k_max: int = 10, reference: str = "top"
) -> Array:
    """Classes that may well be the most probable one: an uncertainty-aware top-k.

    A class belongs to the set if its probability is, at the upper end of its marginal
    Beta distribution, at least that of the most probable class at the lower end.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.
    q : float, default=0.05
        Tail probability of both ends. Sets shrink as it grows, to the top class alone
        from 0.5 on.
    k_max : int, default=10
        Classes in a set, at most.
    reference : {"top", "previous"}, default="top"
        What a class is compared with: the most probable class, or the one before it in
        descending order ("next class"), which allows for more: it ends at the first
        clear gap.

    Returns
    -------
    Tensor or ndarray of shape (..., K)
        Boolean; the most probable class always belongs to the set. Of equal
        concentrations the first comes first.

    Raises
    ------
    ValueError
        If a concentration is not positive, or an option has no such value.

    Notes
    -----
    2 k_max Beta quantiles per row. A Beta(a, A − a) variable grows stochastically with
    a, so that members are the first in descending order.

    References
    ----------
    Hobbhahn, Kristiadi, Hennig (2022), "Fast predictive uncertainty for classification
    with Bayesian deep networks", UAI, section 4.
    """
    check_set(q, k_max, reference)
    a = check_alpha(alpha)
    order = a.argsort(dim=-1, descending=True, stable=True)[..., :k_max]
    leading, total = a.gather(-1, order), a.sum(-1, keepdim=True)
    upper = _marginal_quantile(leading[..., 1:], total, 1 - q)
    before = leading[..., :1] if reference == "top" else leading[..., :-1]
    above = upper >= _marginal_quantile(before, total, q)
    # of equal classes, ends that cross or meet at the median keep the first alone
    stays = (above & (q < 0.5)).cumprod(-1).bool()
    members = torch.zeros_like(a, dtype=torch.bool)
    members.scatter_(-1, order[..., :1], True)
    return like(members.scatter(-1, order[..., 1:], stays), alpha)


def check_set(q: Any, k_max: Any, reference: Any) -> None:
    """Refuse options of `plausible_classes` that have no such value."""
    check_fraction("q", q, "Choose a small tail probability, such as 0.05.")
    check_count("k_max", k_max)
    check_option("reference", reference, REFERENCES)


def _marginal_quantile(a: Tensor, total: Tensor, q: float) -> Tensor:
    """Quantile of ``Beta(a, A − a)``."""
    # scipy's quantiles are good up to about here
    share = (_MAX_OF_QUANTILES / total).clamp(max=1)
    a, rest = a * share, ((total - a) * share).clamp(min=MIN_CONCENTRATION)
    found = betaincinv(a.detach().cpu().numpy(), rest.detach().cpu().numpy(), q)
    return torch.from_numpy(np.asarray(found)).to(a.device)


def _log_beta(a: Tensor) -> Tensor:
    """Logarithm of the normaliser, ``Σ logΓ(α_k) − logΓ(A)``."""
    return a.lgamma().sum(-1) - a.sum(-1).lgamma()

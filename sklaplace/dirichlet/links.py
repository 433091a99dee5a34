"""Links: from a Gaussian over logits to class probabilities.

All approximate ``p = E[softmax(f)]``, ``f ~ N(μ, Σ)``, of which only the centred
Gaussian ``N(m, S)`` matters; see `sklaplace.dirichlet.logits`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sklaplace import dirichlet
from sklaplace.dirichlet.distribution import split_entropy
from sklaplace.dirichlet.gumbel import independent_variances, largest
from sklaplace.dirichlet.logits import centre, centred_factor, centred_moments, chunks

Link = Callable[[Tensor, Tensor, Tensor], Tensor]

# Below this largest variance, the second-order expansion errs less than the mixture.
_SMALL_VARIANCE = 0.09


def mean_field(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Probabilities from the pairwise differences of logits, in closed form.

    Nearly exact for two classes, where it is MacKay's approximation of the
    logistic-Gaussian integral. For many classes with small variances it can be
    less accurate than the softmax of the mean.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K)
        Covariances of the logits.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    Notes
    -----
    ``p_k ∝ 1 / Σ_j exp(−(μ_k − μ_j) / √(1 + π Var(f_k − f_j) / 8))``. O(K²) time
    and memory per row.

    References
    ----------
    Lu, Ie, Sha (2020), "Mean-field approximation to Gaussian-softmax integral
    with application to uncertainty estimation" (the variant with joint
    variances, normalised here).
    MacKay (1992), "The evidence framework applied to classification networks".
    """
    mean, cov = centre(mean, cov)
    variances = cov.diagonal(dim1=-2, dim2=-1)
    gaps = mean.unsqueeze(-2) - mean.unsqueeze(-1)  # (b, k, j): μ_j − μ_k
    spread = variances.unsqueeze(-2) + variances.unsqueeze(-1) - 2 * cov
    return (-(gaps / _inflation(spread)).logsumexp(-1)).softmax(-1)


def probit(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Softmax of logits scaled down by their own standard deviations.

    The cheapest link that sees the variances, and the usual one elsewhere. It
    neglects how logits vary together. For tens of classes and more, and standard
    deviations up to about one, it errs more than the softmax of the mean.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances alone of centred ones.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    Notes
    -----
    ``softmax(m_k / √(1 + π S_kk / 8))`` with the centred ``m`` and ``S``. O(K)
    per row for variances, O(K²) time to centre covariances.

    References
    ----------
    MacKay (1992), "The evidence framework applied to classification networks"
    (two classes).
    Gibbs (1997), "Bayesian Gaussian processes for regression and
    classification", PhD thesis, University of Cambridge (more classes).
    """
    mean, variances = centred_moments(mean, cov)
    return (mean / _inflation(variances)).softmax(-1)


def sodpp(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Second-order expansion of the softmax around the mean of the logits.

    The most accurate closed form for standard deviations below 0.3, and not to be used
    above one. Prefer it where the posterior is narrow and nothing may be sampled.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K)
        Covariances of the logits.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    Notes
    -----
    ``p ∘ (1 + pᵀΣp − Σp + ½ diagΣ − ½ pᵀdiagΣ)`` with ``p = softmax(μ)``, which sums to
    one and errs by O(Σ²). Negative entries, which large variances make, are set to zero
    and the rest is divided by its sum. O(K²) per row.

    References
    ----------
    Bickel and Doksum (2015), "Mathematical statistics", vol. 1, section 5.3 (the delta
    method).
    """
    mean, cov = centre(mean, cov)
    softmax = mean.softmax(-1)
    products = (cov @ softmax.unsqueeze(-1)).squeeze(-1)
    variances = cov.diagonal(dim1=-2, dim2=-1)
    return _expanded(softmax, variances, products)


def gumbel(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Probabilities of logits taken as independent, by one-dimensional quadrature.

    The softmax is the probability that a logit is the largest once each has got Gumbel
    noise of its own. For independent logits, that leaves one integral over the largest
    value, whatever the number of classes. Prefer it where logits share little, and from
    thirty classes on for standard deviations above two. How logits vary together is
    kept only as far as independent ones can have the same centred variances: where few
    causes move more than two logits, `mc` is far better.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances alone of centred ones.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    Notes
    -----
    ``p_k = ∫ F_k'(t) Π_{j≠k} F_j(t) dt`` with the distribution ``F_j`` of a normal plus
    a Gumbel variable, where the latter is a mixture of six normals. Their variances
    ``d`` have ``C diag(d) C`` of the diagonal of ``S``, which is exact for two classes
    (and for three, unless one would be negative). For independent logits, the mixture
    errs by about 0.002 per class, and the quadrature by less than 0.001 over all of
    them. By Jensen's inequality
    ``p_k ≥ e^{a_k} / (Σ_{j≠k} e^{a_j} + e^{a_k + d_k})``, ``a = m + d/2``, which holds
    the tails up. Rows of variances below 0.09 have the expansion of `sodpp`, also for
    independent logits. O(K) per row, 150 error functions and as many exponentials for
    each class, twice or four times that where variances differ by many orders.

    References
    ----------
    Yellott (1977), "The relationship between Luce's choice axiom, Thurstone's theory of
    comparative judgment, and the double exponential distribution", Journal of
    Mathematical Psychology 15 (the Gumbel-max identity).
    Frühwirth-Schnatter and Frühwirth (2007), "Auxiliary mixture sampling with
    applications to logistic models", Computational Statistics & Data Analysis 51
    (Gumbel noise as a mixture of normals).
    """
    mean, centred = centred_moments(mean, cov)
    if mean.shape[-1] == 1:
        return torch.ones_like(mean)
    variances = independent_variances(centred)
    softmax = mean.softmax(-1)
    proba = _expanded(softmax, variances, variances * softmax)
    wide = (variances.amax(-1) > _SMALL_VARIANCE).nonzero().squeeze(-1)
    return proba.index_put((wide,), largest(mean[wide], variances[wide]))


def mc(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Average softmax over draws of the logits.

    The only link whose error vanishes as its budget grows. For standard deviations of
    two and random covariances, the absolute errors of a hundred draws sum to 0.03 for
    ten classes, 0.05 for thirty and 0.2 for three hundred; where two causes move all
    logits, to less than 0.05 for any of them.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K)
        Covariances of the logits.
    draws : Tensor of shape (s, K)
        Standard-normal points, such as `sklaplace.core.random.sobol_normals` gives,
        shared by all rows, so that a row's probabilities do not depend on the others.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    Notes
    -----
    O(K³ + s K²) per row. Rows are taken in chunks, so that memory beyond the inputs
    stays near 2 MiB, or one row's draws if they are larger.
    """
    parts = chunks(mean, cov, len(draws))
    return torch.cat([_drawn(*part, draws).mean(-1) for part in parts])


def mc_uncertainty(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """`uncertainty_of_draws` of Gaussian logits, with the points of `mc`.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K)
        Covariances of the logits.
    draws : Tensor of shape (s, K)
        Standard-normal points.

    Returns
    -------
    Tensor of shape (b, 3)
        In nats, float64.
    """
    parts = chunks(mean, cov, len(draws))
    return torch.cat([uncertainty_of_draws(_drawn(*part, draws)) for part in parts])


def uncertainty_of_draws(proba: Tensor) -> Tensor:
    """Entropy of a label whose probabilities are drawn: total, and its two parts.

    Parameters
    ----------
    proba : Tensor of shape (b, K, s)
        Probabilities of K classes under each of s draws.

    Returns
    -------
    Tensor of shape (b, 3)
        In nats: entropy of the mean (total), mean of the entropies (aleatoric), and
        their difference (epistemic).
    """
    entropies = -torch.special.xlogy(proba, proba).sum(-2)
    return split_entropy(proba.mean(-1), entropies.mean(-1))


def bridge(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Mean of the Dirichlet that the Laplace bridge gives.

    For comparison with the literature. The probabilities do not depend on the
    scale of the covariance, equal the softmax for two classes and do not tend
    to it for more; ``dirichlet.laplace_bridge`` has the uncertainty.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances alone of centred ones.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    Notes
    -----
    O(K) per row for variances, O(K²) to centre covariances.

    References
    ----------
    MacKay (1998), "Choice of basis for Laplace approximation".
    Hobbhahn, Kristiadi, Hennig (2022), "Fast predictive uncertainty for
    classification with Bayesian deep networks", UAI.
    """
    return dirichlet.mean(dirichlet.APPROXIMATIONS["bridge"](mean, cov))


def bridge_norm(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Mean of the Laplace bridge's Dirichlet, corrected for large variances.

    As ``bridge``, but less confident where variances are large. The correction
    is left out where it would sharpen the prediction.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances alone of centred ones.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    Notes
    -----
    O(K) per row for variances, O(K²) to centre covariances.

    References
    ----------
    Hobbhahn, Kristiadi, Hennig (2022), "Fast predictive uncertainty for
    classification with Bayesian deep networks", UAI.
    """
    return dirichlet.mean(dirichlet.APPROXIMATIONS["bridge_norm"](mean, cov))


# links that use their draws
SAMPLED = frozenset({"mc"})
# links for which the variances of the centred logits say enough
DIAGONAL = frozenset({"bridge", "bridge_norm", "gumbel", "probit"})

LINKS: dict[str, Link] = {
    "bridge": bridge,
    "bridge_norm": bridge_norm,
    "gumbel": gumbel,
    "mc": mc,
    "mean_field": mean_field,
    "probit": probit,
    "sodpp": sodpp,
}
"""Links by the name that ``link_approx`` takes."""


# `mean_field` up to so many classes; then `mc`, given enough draws, up to so many
_CLASSES_OF_MEAN_FIELD, _CLASSES_OF_MC, _DRAWS_OF_MC = 2, 16, 50


def choose_link(n_classes: int, n_samples: int = 100) -> str:
    """Name of a link that suits a number of classes.

    The rule behind ``link_approx='auto'``:

    * up to 2 classes ``'mean_field'``: nearly exact, and the cheapest;
    * 3 to 16 classes ``'mc'``, given 50 draws or more: these cover so few dimensions
      well, and see how logits vary together;
    * otherwise ``'gumbel'``: draws cover many dimensions too thinly, unless all logits
      vary by few common causes, which the rule does not look for.

    Parameters
    ----------
    n_classes : int
        Number of classes, K.
    n_samples : int, default=100
        Draws that ``'mc'`` would take.

    Returns
    -------
    str
        A key of ``LINKS``.

    Notes
    -----
    Not the best link in every case, but it has erred no more than ``'probit'`` (up to
    1e-4) with four kinds of covariances from 2 to 256 classes, and independent logits
    of 1000: for standard deviations of logits from 0.01 to 8, means of two and of ten
    times standard normal, and 4, 16 and 100 draws. The gallery has a table.
    """
    if n_classes <= _CLASSES_OF_MEAN_FIELD:
        return "mean_field"
    if n_classes <= _CLASSES_OF_MC and n_samples >= _DRAWS_OF_MC:
        return "mc"
    return "gumbel"


def _expanded(softmax: Tensor, variances: Tensor, products: Tensor) -> Tensor:
    """Second-order expansion from ``p``, ``diagΣ`` and ``Σp``, (b, K) each."""
    change = (
        (softmax * products).sum(-1, keepdim=True)
        - products
        + variances / 2
        - (softmax * variances).sum(-1, keepdim=True) / 2
    )
    # beyond, the expansion says nothing, and could overflow
    proba = softmax * (1 + change.clamp(-1, 1e100))
    return proba / proba.sum(-1, keepdim=True)


def _drawn(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Softmax at the draws: (b, K), (b, K, K), (s, K) -> (b, K, s)."""
    mean, cov = centre(mean, cov)
    factor = centred_factor(cov)  # (b, K, K - 1)
    points = draws[:, : factor.shape[-1]].to(mean)
    # draws last: a softmax over many short rows is slow
    logits = factor @ points.T + mean.unsqueeze(-1)  # (b, K, s)
    return logits.softmax(-2)


def _inflation(variances: Tensor) -> Tensor:
    """How much flatter a sigmoid gets, averaged over a normal of given variance."""
    return (1 + math.pi / 8 * variances.clamp(min=0)).sqrt()

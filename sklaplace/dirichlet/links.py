"""Link approximations: from a Gaussian over logits to class probabilities.

All approximate ``p = E[softmax(f)]``, ``f ~ N(μ, Σ)``, which depends only on the
centred Gaussian ``N(m, S)``; see `sklaplace.dirichlet.logits`. A `Link` says what an
approximation needs: some take the logits as they are, as some publications do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sklaplace import dirichlet
from sklaplace.dirichlet.distribution import split_entropy
from sklaplace.dirichlet.gumbel import (
    MANY_CLASSES,
    argmax_proba,
    independent_variances,
)
from sklaplace.dirichlet.logits import centre, centred_factor, centred_moments, chunks

__all__ = [
    "LINKS",
    "bridge",
    "bridge_norm",
    "choose_link",
    "gumbel",
    "mc",
    "mean_field",
    "probit",
    "probit_uncentred",
    "sodpp",
]

Probabilities = Callable[[Tensor, Tensor, Tensor], Tensor]

# Up to this largest variance the second-order expansion is more accurate than the
# quadrature.
_SMALL_VARIANCE = 0.09
# Variances of the samples that `gumbel` takes at once, of many classes: several have a
# quadrature together, and arrays stay in the caches.
_MANY_BYTES = 2**23
# Logits of draws in single precision, whose sums over classes are finite.
_LARGE = 1e30


def mean_field(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Probabilities from the pairwise differences of logits, in closed form.

    Nearly exact for two classes, where it is MacKay's approximation of the
    logistic-Gaussian integral. For many classes with small variances it can be
    less accurate than the softmax of the mean.

    Read more in the :ref:`User Guide <link>`.

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

    See Also
    --------
    probit : Cheaper, without covariances.
    choose_link : Where this one is chosen.

    Notes
    -----
    ``p_k ∝ 1 / Σ_j exp(−(μ_k − μ_j) / √(1 + π Var(f_k − f_j) / 8))``. O(K²) time
    and memory per sample.

    References
    ----------
    Lu, Ie, Sha (2020), "Mean-field approximation to Gaussian-softmax integral
    with application to uncertainty estimation" (the variant with joint
    variances, normalised here).
    MacKay (1992), "The evidence framework applied to classification networks".

    Examples
    --------
    >>> import torch
    >>> from sklaplace.dirichlet.links import mean_field
    >>> mean, cov = torch.tensor([[2.0, 0.0, 0.0]]), torch.eye(3).unsqueeze(0)
    >>> mean_field(mean, cov, torch.empty(0, 3)).numpy().round(2)
    array([[0.69, 0.15, 0.15]])
    """
    mean, cov = centre(mean, cov)
    variances = cov.diagonal(dim1=-2, dim2=-1)
    gaps = mean.unsqueeze(-2) - mean.unsqueeze(-1)  # (b, k, j): μ_j − μ_k
    of_gaps = variances.unsqueeze(-2) + variances.unsqueeze(-1) - 2 * cov
    return (-(gaps / _probit_scale(of_gaps)).logsumexp(-1)).softmax(-1)


def probit(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Softmax of the mean logits, each divided by ``√(1 + π/8 · variance)``.

    The cheapest link that depends on the variances, and the most widely used. It
    neglects covariances between logits. For tens of classes and more, and standard
    deviations up to about one, its error exceeds the error of the softmax of the mean.

    Read more in the :ref:`User Guide <link>`.

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

    See Also
    --------
    probit_uncentred : As published.
    mean_field : With covariances.

    Notes
    -----
    ``softmax(m_k / √(1 + π S_kk / 8))`` with the centred ``m`` and ``S``. O(K)
    per sample for variances, O(K²) time to centre covariances.

    References
    ----------
    MacKay (1992), "The evidence framework applied to classification networks"
    (two classes).
    Gibbs (1997), "Bayesian Gaussian processes for regression and
    classification", PhD thesis, University of Cambridge (more classes).

    Examples
    --------
    >>> import torch
    >>> from sklaplace.dirichlet.links import probit
    >>> mean, cov = torch.tensor([[2.0, 0.0, 0.0]]), torch.eye(3).unsqueeze(0)
    >>> probit(mean, cov, torch.empty(0, 3)).numpy().round(2)
    array([[0.75, 0.13, 0.13]])
    """
    mean, variances = centred_moments(mean, cov)
    return (mean / _probit_scale(variances)).softmax(-1)


def probit_uncentred(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """`probit` of logits as they are, without centring: the published extension.

    For comparison with the literature, where it is called probit, or extended MacKay,
    approximation. Unlike the expected softmax it depends on a shift that all logits
    have in common: where the variance of that is large, as with Kronecker-factored
    curvature or a bias in the last layer, it is far too uncertain. For independent
    logits of two to four classes it is more accurate than `probit`.

    Read more in the :ref:`User Guide <link>`.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances alone.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    See Also
    --------
    probit : Of centred logits, which depends on no shift of all of them.

    Notes
    -----
    ``softmax(μ_k / √(1 + π Σ_kk / 8))``. O(K) per sample.

    References
    ----------
    Gibbs (1997), "Bayesian Gaussian processes for regression and
    classification", PhD thesis, University of Cambridge.
    Hobbhahn, Kristiadi, Hennig (2022), "Fast predictive uncertainty for
    classification with Bayesian deep networks", UAI (a baseline).

    Examples
    --------
    >>> import torch
    >>> from sklaplace.dirichlet.links import probit_uncentred
    >>> mean, cov = torch.tensor([[2.0, 0.0, 0.0]]), torch.eye(3).unsqueeze(0)
    >>> probit_uncentred(mean, cov, torch.empty(0, 3)).numpy().round(2)
    array([[0.73, 0.13, 0.13]])
    """
    variances = cov if cov.shape == mean.shape else cov.diagonal(dim1=-2, dim2=-1)
    return (mean.double() / _probit_scale(variances.double())).softmax(-1)


def sodpp(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Second-order expansion of the softmax around the mean of the logits.

    The most accurate closed form for standard deviations below 0.3, and not to be used
    above one. Prefer it for small posterior variances without sampling.

    Read more in the :ref:`User Guide <link>`.

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

    See Also
    --------
    mean_field : For larger variances.
    mc : For any variances, by draws.

    Notes
    -----
    ``p ∘ (1 + pᵀΣp − Σp + ½ diagΣ − ½ pᵀdiagΣ)`` with ``p = softmax(μ)``, which sums to
    one and has an error of O(Σ²). Negative entries, which occur for large variances,
    are set to zero and the rest is divided by its sum. O(K²) per sample.

    References
    ----------
    Bickel and Doksum (2015), "Mathematical statistics", vol. 1, section 5.3 (the delta
    method).

    Examples
    --------
    >>> import torch
    >>> from sklaplace.dirichlet.links import sodpp
    >>> mean, cov = torch.tensor([[2.0, 0.0, 0.0]]), torch.eye(3).unsqueeze(0)
    >>> sodpp(mean, cov, torch.empty(0, 3)).numpy().round(2)
    array([[0.67, 0.16, 0.16]])
    """
    mean, cov = centre(mean, cov)
    softmax = mean.softmax(-1)
    products = (cov @ softmax.unsqueeze(-1)).squeeze(-1)
    return _expanded(softmax, cov.diagonal(dim1=-2, dim2=-1), products)


def gumbel(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Probabilities of logits assumed independent, by one-dimensional quadrature.

    The softmax is the probability that a logit is the largest after independent Gumbel
    noise was added to each. For independent logits this is one integral over the
    largest value, for any number of classes. Prefer it for weakly correlated logits,
    and from thirty classes on for standard deviations above two. Covariances are used
    only to find independent logits with the same centred variances: for logits with few
    common factors `mc` is far more accurate.

    Read more in the :ref:`User Guide <link>`.

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

    See Also
    --------
    mc : Accurate for correlated logits, too.
    choose_link : Where this one is chosen.

    Notes
    -----
    ``p_k = ∫ F_k'(t) Π_{j≠k} F_j(t) dt`` with the distribution ``F_j`` of a normal plus
    a Gumbel variable, where ``-log(-log F_j)`` is approximated by a polynomial. The
    variances ``d`` are chosen so that ``C diag(d) C`` has the diagonal of ``S``, which
    is exact for two classes (and for three, unless one would be negative). For
    independent logits, the error of the polynomial is about 0.0003 per class, and that
    of the quadrature less than 0.001 over all of them. Samples with all variances below
    0.09 use the expansion of `sodpp` for independent logits. O(K) per sample: about 20
    exponentials and polynomials of degree seven per class, two to four times as many
    where variances differ by orders of magnitude.

    References
    ----------
    Yellott (1977), "The relationship between Luce's choice axiom, Thurstone's theory of
    comparative judgment, and the double exponential distribution", Journal of
    Mathematical Psychology 15 (the Gumbel-max identity).

    Examples
    --------
    >>> import torch
    >>> from sklaplace.dirichlet.links import gumbel
    >>> mean, cov = torch.tensor([[2.0, 0.0, 0.0]]), torch.eye(3).unsqueeze(0)
    >>> gumbel(mean, cov, torch.empty(0, 3)).numpy().round(2)
    array([[0.7 , 0.15, 0.15]])
    """
    if mean.shape[-1] > MANY_CLASSES:  # a few samples at a time
        n = max(1, _MANY_BYTES // (8 * cov[:1].numel()))
        parts = zip(mean.split(n), cov.split(n), strict=True)
        return torch.cat([_gumbel(*part) for part in parts])
    return _gumbel(mean, cov)


def _gumbel(mean: Tensor, cov: Tensor) -> Tensor:
    """`gumbel` of a few samples."""
    mean, centred = centred_moments(mean, cov)
    if mean.shape[-1] == 1:
        return torch.ones_like(mean)
    variances = independent_variances(centred)
    wide = (variances.amax(-1) > _SMALL_VARIANCE).nonzero().squeeze(-1)
    if len(wide) == len(mean):
        return argmax_proba(mean, variances)
    softmax = mean.softmax(-1)
    proba = _expanded(softmax, variances, variances * softmax)
    found = argmax_proba(mean[wide], variances[wide])
    return proba.index_put((wide,), found)


def mc(
    mean: Tensor, cov: Tensor, draws: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Average softmax over draws of the logits.

    The only link whose error vanishes with the number of draws. For standard deviations
    of two and random covariances, the absolute errors of a hundred draws sum to 0.03
    for ten classes, 0.05 for thirty and 0.2 for three hundred; for covariances of rank
    two, to less than 0.05 for any of them.

    Read more in the :ref:`User Guide <link>`.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K)
        Covariances of the logits.
    draws : Tensor of shape (s, K)
        Standard-normal points, such as from `sklaplace.core.random.sobol_normals`,
        the same for all samples: the probabilities of one do not depend on the others.
    dtype : torch.dtype
        Of the draws. In float32 they take half the time, and probabilities have errors
        of 1e-7, which depend on the other samples.

    Returns
    -------
    Tensor of shape (b, K)
        Probabilities, float64; rows sum to one.

    See Also
    --------
    gumbel : Without draws, for many classes.
    choose_link : Where this one is chosen.

    Notes
    -----
    O(K³ + s K²) per sample. Samples are processed in chunks, so that memory beyond the
    inputs is about 2 MiB, or the draws of one sample if they take more.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.dirichlet.links import mc
    >>> mean, cov = torch.tensor([[2.0, 0.0, 0.0]]), torch.eye(3).unsqueeze(0)
    >>> draws = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    >>> round(float(mc(mean, cov, draws)[0, 0]), 1)
    0.7
    """
    parts = chunks(mean, cov, len(draws))
    drawn = (_sampled_proba(*part, draws, dtype) for part in parts)
    return torch.cat([proba.mean(-1).double() for proba in drawn])


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
    parts = (_sampled_proba(*part, draws) for part in chunks(mean, cov, len(draws)))
    return torch.cat([uncertainty_of_draws(proba) for proba in parts])


def uncertainty_of_draws(proba: Tensor) -> Tensor:
    """Total, aleatoric and epistemic entropy from draws of the probabilities.

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
    """Mean of the Dirichlet from the Laplace bridge.

    For comparison with the literature. The probabilities do not depend on the
    scale of the covariance, equal the softmax for two classes and do not converge
    to it for more; only the concentrations of ``dirichlet.laplace_bridge`` depend on
    the uncertainty.

    Read more in the :ref:`User Guide <link>`.

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

    See Also
    --------
    bridge_norm : With a correction for large variances.
    sklaplace.dirichlet.laplace_bridge : The Dirichlet itself.

    Notes
    -----
    O(K) per sample for variances, O(K²) to centre covariances.

    References
    ----------
    MacKay (1998), "Choice of basis for Laplace approximation".
    Hobbhahn, Kristiadi, Hennig (2022), "Fast predictive uncertainty for
    classification with Bayesian deep networks", UAI.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.dirichlet.links import bridge
    >>> mean, cov = torch.tensor([[2.0, 0.0, 0.0]]), torch.eye(3).unsqueeze(0)
    >>> bridge(mean, cov, torch.empty(0, 3)).numpy().round(2)
    array([[0.65, 0.18, 0.18]])
    """
    return dirichlet.mean(dirichlet.APPROXIMATIONS["bridge"](mean, cov))


def bridge_norm(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Mean of the Dirichlet from the Laplace bridge, corrected for large variances.

    Like ``bridge``, but less confident where variances are large. The correction
    is left out where it would make the prediction more confident.

    Read more in the :ref:`User Guide <link>`.

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

    See Also
    --------
    bridge : Without the correction.
    sklaplace.dirichlet.laplace_bridge : The Dirichlet itself.

    Notes
    -----
    O(K) per sample for variances, O(K²) to centre covariances.

    References
    ----------
    Hobbhahn, Kristiadi, Hennig (2022), "Fast predictive uncertainty for
    classification with Bayesian deep networks", UAI.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.dirichlet.links import bridge_norm
    >>> mean, cov = torch.tensor([[2.0, 0.0, 0.0]]), torch.eye(3).unsqueeze(0)
    >>> bridge_norm(mean, cov, torch.empty(0, 3)).numpy().round(2)
    array([[0.65, 0.18, 0.18]])
    """
    return dirichlet.mean(dirichlet.APPROXIMATIONS["bridge_norm"](mean, cov))


@dataclass(frozen=True)
class Link:
    """An approximation of the expected softmax, and what it needs.

    Attributes
    ----------
    function : callable
        ``(mean (b, K), cov (b, K, K), draws (s, K)) -> (b, K)``.
    diagonal : bool
        Whether ``function`` also takes variances (b, K) in place of covariances.
    centred : bool
        Whether the logits are centred first.
    draws : bool
        Whether draws are used.
    cheap : bool
        Whether ``function`` takes no longer than the computation of the variances.
    single : callable or None
        Single-precision version of ``function``, which is faster, if there is one.
    """

    function: Probabilities
    diagonal: bool = False
    centred: bool = True
    draws: bool = False
    cheap: bool = False
    single: Probabilities | None = None

    def __call__(self, mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
        """Return probabilities (b, K) of Gaussian logits."""
        return self.function(mean, cov, draws)

    def score(self, mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
        """Return probabilities for sums over many samples: single precision will do."""
        return (self.single or self.function)(mean, cov, draws)


LINKS: dict[str, Link] = {
    "bridge": Link(bridge, diagonal=True, cheap=True),
    "bridge_norm": Link(bridge_norm, diagonal=True, cheap=True),
    "gumbel": Link(gumbel, diagonal=True),
    "mc": Link(mc, draws=True, single=partial(mc, dtype=torch.float32)),
    "mean_field": Link(mean_field),
    "probit": Link(probit, diagonal=True, cheap=True),
    "probit_uncentred": Link(
        probit_uncentred, diagonal=True, centred=False, cheap=True
    ),
    "sodpp": Link(sodpp),
}
"""Links by their name in ``link_approx``."""


# Largest numbers of classes for `mean_field` and `mc`, and fewest draws for the latter
_CLASSES_OF_MEAN_FIELD, _CLASSES_OF_MC, _DRAWS_OF_MC = 2, 16, 50


def choose_link(n_classes: int, n_samples: int = 100) -> str:
    """Name of the link for a number of classes.

    The rule behind ``link_approx='auto'``:

    * up to 2 classes ``'mean_field'``: nearly exact, and the cheapest;
    * 3 to 16 classes ``'mc'``, with 50 draws or more: accurate in few dimensions, with
      all covariances of the logits;
    * otherwise ``'gumbel'``: in many dimensions draws are less accurate, unless the
      covariance is of low rank, which the rule does not check.

    Read more in the :ref:`User Guide <link>`.

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

    See Also
    --------
    mean_field : For two classes.
    mc : For a few.
    gumbel : For many.

    Notes
    -----
    Not the best link in every case, but its error did not exceed the error of
    ``'probit'`` (by more than 1e-4) for four kinds of covariances from 2 to 256 classes
    and for 1000 independent logits: with standard deviations of logits from 0.01 to 8,
    means of two and ten times standard normal, and 4, 16 and 100 draws. The gallery has
    a table.

    Examples
    --------
    >>> from sklaplace.dirichlet.links import choose_link
    >>> choose_link(2), choose_link(10), choose_link(1000)
    ('mean_field', 'mc', 'gumbel')
    """
    if n_classes <= _CLASSES_OF_MEAN_FIELD:
        return "mean_field"
    if n_classes <= _CLASSES_OF_MC and n_samples >= _DRAWS_OF_MC:
        return "mc"
    return "gumbel"


def _expanded(softmax: Tensor, variances: Tensor, products: Tensor) -> Tensor:
    """Second-order expansion from ``p``, ``diagΣ`` and ``Σp``, (b, K) each."""
    change = variances / 2 - products
    change = change - (softmax * change).sum(-1, keepdim=True)
    # larger changes are outside the range of the expansion, and could overflow
    proba = softmax * (1 + change.clamp(-1, 1e100))
    return proba / proba.sum(-1, keepdim=True)


def _sampled_proba(
    mean: Tensor, cov: Tensor, draws: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Softmax of drawn logits: (b, K), (b, K, K), (s, K) -> (b, K, s)."""
    mean, centred = centre(mean, cov)
    factor = centred_factor(centred, cov)  # (b, K, K - 1)
    if dtype != mean.dtype:
        # within the range and, of the largest, the digits of the other dtype
        mean = (mean - mean.amax(-1, keepdim=True)).clamp(min=-_LARGE).to(dtype)
        factor = factor.clamp(-_LARGE, _LARGE).to(dtype)
    points = draws[:, : factor.shape[-1]].to(factor)
    # draws on the last axis: a softmax over short contiguous rows is slow
    return (factor @ points.T + mean.unsqueeze(-1)).softmax(-2)


def _probit_scale(variances: Tensor) -> Tensor:
    """``√(1 + π v / 8)``: divisor of a logit of variance ``v``."""
    return (1 + math.pi / 8 * variances.clamp(min=0)).sqrt()

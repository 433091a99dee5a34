"""Link approximations: class probabilities from a Gaussian over logits.

All links approximate ``p = E[softmax(f)]`` for ``f ~ N(μ, Σ)``. This expectation
depends only on the centred Gaussian ``N(m, S)``; see `sklaplace.dirichlet.logits`. All
links centre the logits, except `probit_uncentred`, which follows the literature. A
`Link` also describes the inputs of the approximation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sklaplace import dirichlet
from sklaplace.dirichlet.distribution import split_entropy
from sklaplace.dirichlet.gumbel import MANY_CLASSES, argmax_proba
from sklaplace.dirichlet.logits import (
    centre,
    centred_factor,
    centred_moments,
    chunks,
    independent_variances,
    unrolled_factor,
)

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

# If no variance exceeds this value, the second-order expansion is more accurate than
# quadrature.
_MAX_EXPANDED_VARIANCE = 0.09
# Bytes of variances that `gumbel` processes at once if there are many classes. With
# this size, several samples share a quadrature, and arrays fit into the CPU caches.
_GUMBEL_CHUNK_BYTES = 2**23
# Bound on drawn single-precision logits, which keeps sums over classes finite.
_MAX_FLOAT32_LOGIT = 1e30


def mean_field(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Compute probabilities from pairwise differences of logits, in closed form.

    For two classes, this link is nearly exact and equals MacKay's approximation to the
    logistic-Gaussian integral. For many classes with small variances, it can be less
    accurate than the softmax of the mean logits.

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
        Float64 probabilities. Each row sums to one.

    See Also
    --------
    probit : Cheaper link without covariances.
    choose_link : Rule for the default link.

    Notes
    -----
    The probabilities are
    ``p_k ∝ 1 / Σ_j exp(−(μ_k − μ_j) / √(1 + π Var(f_k − f_j) / 8))``. The cost is O(K²)
    time and memory per sample.

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
    gap_variances = variances.unsqueeze(-2) + variances.unsqueeze(-1) - 2 * cov
    # each probability is 1 / Σ_j exp(gap_j / scale_j), divided by their sum
    return (-(gaps / _probit_scale(gap_variances)).logsumexp(-1)).softmax(-1)


def probit(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Compute the softmax of the mean logits divided by ``√(1 + π/8 · variance)``.

    This link is the most widely used one, and the cheapest link that depends on the
    variances. It ignores covariances between logits. For dozens of classes or more, and
    standard deviations up to about one, it is less accurate than the softmax of the
    mean logits.

    Read more in the :ref:`User Guide <link>`.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances of centred logits.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Float64 probabilities. Each row sums to one.

    See Also
    --------
    probit_uncentred : Probit link without centring, as published.
    mean_field : Link with covariances.

    Notes
    -----
    The probabilities are ``softmax(m_k / √(1 + π S_kk / 8))`` for the centred ``m`` and
    ``S``. The cost per sample is O(K) for variances, or O(K²) for covariances.

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
    """Apply `probit` to uncentred logits, as in the literature.

    Use this link for comparisons with the literature, which calls it the probit or
    extended MacKay approximation. Unlike the expected softmax, the result depends on a
    shift common to all logits. If the variance of this shift is large, as with
    Kronecker-factored curvature or a bias in the last layer, predictions are far too
    uncertain. For independent logits of two to four classes, this link is more accurate
    than `probit`.

    Read more in the :ref:`User Guide <link>`.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Float64 probabilities. Each row sums to one.

    See Also
    --------
    probit : Probit of centred logits, invariant to a common shift.

    Notes
    -----
    The probabilities are ``softmax(μ_k / √(1 + π Σ_kk / 8))``. The cost is O(K) per
    sample.

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
    """Expand the softmax to second order around the mean of the logits.

    For standard deviations below 0.3, this link is the most accurate closed form. Use
    it for small posterior variances to avoid sampling, but not for standard deviations
    above one.

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
        Float64 probabilities. Each row sums to one.

    See Also
    --------
    mean_field : Link for larger variances.
    mc : Link that averages draws, for any variances.

    Notes
    -----
    The expansion is ``p ∘ (1 + pᵀΣp − Σp + ½ diagΣ − ½ pᵀdiagΣ)`` with
    ``p = softmax(μ)``. It sums to one and has an error of O(Σ²). Large variances can
    lead to negative entries, which are set to zero before the row is divided by its
    sum. The cost is O(K²) per sample.

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


def gumbel(
    mean: Tensor, cov: Tensor, draws: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Compute probabilities of independent logits by one-dimensional quadrature.

    The softmax of a class is the probability that its logit is the largest after
    independent Gumbel noise is added to each logit. If the logits are independent, this
    probability is a one-dimensional integral over the largest value, whatever the
    number of classes. Prefer this link for weakly correlated logits, and for thirty or
    more classes with standard deviations above two. Covariances are used only to find
    independent logits with the same centred variances. If the logits depend on a few
    common factors, `mc` is far more accurate.

    Read more in the :ref:`User Guide <link>`.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances of centred logits.
    draws : Tensor of shape (s, K)
        Ignored.
    dtype : torch.dtype
        Dtype of the quadrature. float32 takes half the time, but causes errors of 1e-6
        that depend on the other samples.

    Returns
    -------
    Tensor of shape (b, K)
        Float64 probabilities. Each row sums to one.

    See Also
    --------
    mc : Link that is also accurate for correlated logits.
    choose_link : Rule for the default link.

    Notes
    -----
    The probabilities are ``p_k = ∫ F_k'(t) Π_{j≠k} F_j(t) dt``, where ``F_j`` is the
    distribution function of the sum of a normal and a Gumbel variable. A polynomial
    approximates ``-log(-log F_j)``. The variances ``d`` of the independent logits are
    chosen so that ``C diag(d) C`` has the same diagonal as ``S``. The probabilities of
    the independent logits are then exact for two classes, and also for three classes
    unless a variance would be negative. For independent logits, the error of the
    polynomial is about 0.0003 per class, and the error of the quadrature is below 0.001
    over all classes. If all variances of a sample are below 0.09, the expansion of
    `sodpp` for independent logits is used. The cost is O(K) per sample: about 20
    exponentials and polynomials of degree seven per class, and two to four times as
    many if variances differ by orders of magnitude.

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
        # 8 bytes for each float64 entry of one sample's variances or covariances
        n = max(1, _GUMBEL_CHUNK_BYTES // (8 * cov[:1].numel()))
        pairs = zip(mean.split(n), cov.split(n), strict=True)
        return torch.cat([_gumbel(m, c, dtype) for m, c in pairs])
    return _gumbel(mean, cov, dtype)


def _gumbel(mean: Tensor, cov: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the probabilities (b, K) of `gumbel` for a few samples.

    The logits are treated as independent, with the same variances after centring. The
    expected softmax is integrated by quadrature for samples with a large variance. The
    cheaper second-order expansion is used for the others.
    """
    mean, centred = centred_moments(mean, cov)
    if mean.shape[-1] == 1:
        return torch.ones_like(mean)
    variances = independent_variances(centred)
    wide = (variances.amax(-1) > _MAX_EXPANDED_VARIANCE).nonzero().squeeze(-1)
    if len(wide) == len(mean):  # no expansion is needed
        return argmax_proba(mean, variances, dtype=dtype)
    softmax = mean.softmax(-1)
    # for independent logits, Σp is the elementwise product
    proba = _expanded(softmax, variances, variances * softmax)
    integrated = argmax_proba(mean[wide], variances[wide], dtype=dtype)
    return proba.index_put((wide,), integrated)


def mc(
    mean: Tensor, cov: Tensor, draws: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Average the softmax over draws of the logits.

    Far from the data, the logits have a large variance in common. With few draws, the
    most probable class would be random. If s draws are averaged, a common variance
    beyond ``2 s / K`` is therefore integrated in closed form, similarly to `probit`.

    This is the only link whose error vanishes as the number of draws grows. With 100
    draws, standard deviations of two and random covariances, the sum of the absolute
    errors is 0.03 for 10 classes, 0.05 for 30 classes and 0.2 for 300 classes. With
    covariances of rank two, the sum is below 0.05 in all three cases.

    Read more in the :ref:`User Guide <link>`.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K)
        Covariances of the logits.
    draws : Tensor of shape (s, K)
        Standard-normal points, for example from `sklaplace.core.random.sobol_normals`.
        All samples share the points, so the probabilities of a sample do not depend on
        the other samples.
    dtype : torch.dtype
        Dtype of the draws. float32 takes half the time, but causes errors of 1e-7 that
        depend on the other samples.

    Returns
    -------
    Tensor of shape (b, K)
        Float64 probabilities. Each row sums to one.

    See Also
    --------
    gumbel : Link without draws, for many classes.
    choose_link : Rule for the default link.

    Notes
    -----
    The cost is O(K³ + s K²) per sample. Samples are processed in chunks, so the
    additional memory is about 2 MiB, or the size of one sample's draws if that is
    larger.

    Examples
    --------
    >>> import torch
    >>> from sklaplace.dirichlet.links import mc
    >>> mean, cov = torch.tensor([[2.0, 0.0, 0.0]]), torch.eye(3).unsqueeze(0)
    >>> draws = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    >>> round(float(mc(mean, cov, draws)[0, 0]), 1)
    0.7
    """
    # one chunk of samples at a time; its probabilities are (b, K, s)
    pairs = chunks(mean, cov, len(draws))
    scaled = (without_common_variance(m, c, len(draws)) for m, c in pairs)
    drawn = (_sampled_proba(m, c, draws, dtype) for m, c in scaled)
    return torch.cat([proba.mean(-1).double() for proba in drawn])


def _unrolled_mc(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Compute `mc` for all samples at once, by operators that ONNX has."""
    mean, cov = without_common_variance(mean, cov, len(draws))
    return _sampled_proba(mean, cov, draws, factorised=unrolled_factor).mean(-1)


def mc_uncertainty(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Apply `uncertainty_of_draws` to Gaussian logits, with draws as in `mc`.

    Unlike in `mc`, a large common variance is also drawn, because scaled logits would
    have another expected entropy.

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
        Float64 entropies in nats.
    """
    drawn = (_sampled_proba(m, c, draws) for m, c in chunks(mean, cov, len(draws)))
    return torch.cat([uncertainty_of_draws(proba) for proba in drawn])


def uncertainty_of_draws(proba: Tensor) -> Tensor:
    """Return total, aleatoric and epistemic entropies from draws of probabilities.

    Parameters
    ----------
    proba : Tensor of shape (b, K, s)
        Probabilities of K classes for each of s draws.

    Returns
    -------
    Tensor of shape (b, 3)
        Entropies in nats: entropy of the mean (total), mean of the entropies
        (aleatoric), and their difference (epistemic).
    """
    entropies = -torch.special.xlogy(proba, proba).sum(-2)
    return split_entropy(proba.mean(-1), entropies.mean(-1))


def bridge(mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
    """Return the mean of the Dirichlet from the Laplace bridge.

    Use this link for comparisons with the literature. The probabilities do not depend
    on the scale of the covariance. For two classes, the probabilities equal the softmax
    of the mean logits. For more classes, they differ from this softmax even if the
    covariance is small. Only the concentrations of ``dirichlet.laplace_bridge`` depend
    on the uncertainty.

    Read more in the :ref:`User Guide <link>`.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances of centred logits.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Float64 probabilities. Each row sums to one.

    See Also
    --------
    bridge_norm : Link with a correction for large variances.
    sklaplace.dirichlet.laplace_bridge : Dirichlet concentrations.

    Notes
    -----
    The cost per sample is O(K) for variances, or O(K²) for covariances.

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
    """Return the mean of the Laplace bridge, corrected for large variances.

    This link is like ``bridge``, but less confident for large variances. The correction
    is omitted if it would make the prediction more confident.

    Read more in the :ref:`User Guide <link>`.

    Parameters
    ----------
    mean : Tensor of shape (b, K)
        Means of the logits.
    cov : Tensor of shape (b, K, K) or (b, K)
        Covariances of the logits, or variances of centred logits.
    draws : Tensor of shape (s, K)
        Ignored.

    Returns
    -------
    Tensor of shape (b, K)
        Float64 probabilities. Each row sums to one.

    See Also
    --------
    bridge : Link without the correction.
    sklaplace.dirichlet.laplace_bridge : Dirichlet concentrations.

    Notes
    -----
    The cost per sample is O(K) for variances, or O(K²) for covariances.

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
    """Approximation to the expected softmax, with a description of its inputs.

    Attributes
    ----------
    function : callable
        Function ``(mean (b, K), cov (b, K, K), draws (s, K)) -> (b, K)``.
    diagonal : bool
        Whether ``function`` also accepts variances (b, K) instead of covariances.
    centred : bool
        Whether ``function`` centres the logits.
    draws : bool
        Whether ``function`` uses the draws.
    cheap : bool
        Whether ``function`` costs no more than computing the variances.
    single : callable or None
        Faster single-precision version of ``function``, if any.
    exported : callable or None
        Version of ``function`` for `torch.export` and ONNX, if any: without branches
        that depend on values, and without matrix factorisations.
    """

    function: Probabilities
    diagonal: bool = False
    centred: bool = True
    draws: bool = False
    cheap: bool = False
    single: Probabilities | None = None
    exported: Probabilities | None = None

    def __call__(self, mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
        """Return the probabilities (b, K) for Gaussian logits."""
        return self.function(mean, cov, draws)

    def score(self, mean: Tensor, cov: Tensor, draws: Tensor) -> Tensor:
        """Return less precise probabilities that suffice for sums over samples."""
        return (self.single or self.function)(mean, cov, draws)


LINKS: dict[str, Link] = {
    "bridge": Link(bridge, diagonal=True, cheap=True),
    "bridge_norm": Link(bridge_norm, diagonal=True, cheap=True),
    "gumbel": Link(gumbel, diagonal=True, single=partial(gumbel, dtype=torch.float32)),
    "mc": Link(
        mc,
        draws=True,
        single=partial(mc, dtype=torch.float32),
        exported=_unrolled_mc,
    ),
    "mean_field": Link(mean_field, exported=mean_field),
    "probit": Link(probit, diagonal=True, cheap=True, exported=probit),
    "probit_uncentred": Link(
        probit_uncentred,
        diagonal=True,
        centred=False,
        cheap=True,
        exported=probit_uncentred,
    ),
    "sodpp": Link(sodpp, exported=sodpp),
}
"""Links, keyed by the value of ``link_approx``."""


# Maximum numbers of classes for `mean_field` and `mc`, and minimum number of draws for
# `mc`.
_MAX_CLASSES_OF_MEAN_FIELD, _MAX_CLASSES_OF_MC, _MIN_DRAWS_OF_MC = 2, 16, 50


def choose_link(n_classes: int, n_samples: int = 100) -> str:
    """Choose a link by the number of classes.

    ``link_approx='auto'`` uses this rule:

    * up to 2 classes: ``'mean_field'``, which is nearly exact and the cheapest;
    * 3 to 16 classes with 50 or more draws: ``'mc'``, which uses all covariances of the
      logits and is accurate in few dimensions;
    * otherwise: ``'gumbel'``, because draws are less accurate in many dimensions. Draws
      are accurate for covariances of low rank, but the rule does not check the rank.

    Read more in the :ref:`User Guide <link>`.

    Parameters
    ----------
    n_classes : int
        Number of classes, K.
    n_samples : int, default=100
        Number of draws for ``'mc'``.

    Returns
    -------
    str
        Key of ``LINKS``.

    See Also
    --------
    mean_field : Link for two classes.
    mc : Link for a few classes.
    gumbel : Link for many classes.

    Notes
    -----
    The chosen link is not always the best. In tests, its error exceeded the error of
    ``'probit'`` by at most 1e-4. The tests covered:

    * four kinds of covariances with 2 to 256 classes, and 1000 independent logits;
    * standard deviations of the logits from 0.01 to 8;
    * means of the logits drawn from a standard normal and multiplied by two and by ten;
    * 4, 16 and 100 draws.

    A table in the gallery shows the results.

    Examples
    --------
    >>> from sklaplace.dirichlet.links import choose_link
    >>> choose_link(2), choose_link(10), choose_link(1000)
    ('mean_field', 'mc', 'gumbel')
    """
    if n_classes <= _MAX_CLASSES_OF_MEAN_FIELD:
        return "mean_field"
    if n_classes <= _MAX_CLASSES_OF_MC and n_samples >= _MIN_DRAWS_OF_MC:
        return "mc"
    return "gumbel"


def _expanded(softmax: Tensor, variances: Tensor, products: Tensor) -> Tensor:
    """Expand the softmax to second order, given ``p``, ``diagΣ`` and ``Σp``.

    The result is ``p_k (1 + c_k − pᵀc)`` with ``c = diagΣ / 2 − Σp``, normalised.
    """
    change = variances / 2 - products
    change = change - (softmax * change).sum(-1, keepdim=True)
    # A change below −1 would make a probability negative. Changes above 1e100 are far
    # outside the range of the expansion, and could overflow.
    proba = softmax * (1 + change.clamp(-1, 1e100))
    return proba / proba.sum(-1, keepdim=True)


def _sampled_proba(
    mean: Tensor,
    cov: Tensor,
    draws: Tensor,
    dtype: torch.dtype = torch.float64,
    factorised: Callable[[Tensor, Tensor], Tensor] = centred_factor,
) -> Tensor:
    """Compute the softmax of drawn logits: (b, K), (b, K, K), (s, K) -> (b, K, s).

    The logits are drawn in the given dtype. ``factorised`` maps centred and uncentred
    covariances to factors of the centred covariances.
    """
    mean, centred = centre(mean, cov)
    factor = factorised(centred, cov)  # (b, K, K - 1)
    if dtype != mean.dtype:
        # keep logits in the range of the dtype, and the largest logits precise
        mean = mean - mean.amax(-1, keepdim=True)
        mean = mean.clamp(min=-_MAX_FLOAT32_LOGIT).to(dtype)
        factor = factor.clamp(-_MAX_FLOAT32_LOGIT, _MAX_FLOAT32_LOGIT).to(dtype)
    # centred logits have K - 1 dimensions, so the last coordinate is not needed
    points = draws[:, : factor.shape[-1]].to(factor)
    # draws on the last axis, because a softmax over short contiguous rows is slow
    return (factor @ points.T + mean.unsqueeze(-1)).softmax(-2)


# Factors ``a`` of a large common variance ``v``, for up to seven classes. With ``a v``
# instead of ``π v / 8``, the derivative of the probabilities at equal means is exact:
# ``a = ((1 - 1/K) / E)²`` for the expected maximum E of K standard-normal variables.
# For more classes, ``π / 8`` is more accurate.
_COMMON_SCALES = {2: 0.7854, 3: 0.6206, 4: 0.5308, 5: 0.4732, 6: 0.4325, 7: 0.4018}


def without_common_variance(
    mean: Tensor, cov: Tensor, n_draws: int
) -> tuple[Tensor, Tensor]:
    """Scale the logits, instead of drawing a large variance that all classes share.

    Parameters
    ----------
    mean, cov : Tensor of shape (b, K) and (b, K, K)
        Gaussians over the logits.
    n_draws : int
        Number of draws. The error of their mean grows with ``K / n_draws``, and the
        error of the scale falls with the variance.

    Returns
    -------
    mean, cov : Tensor of shape (b, K) and (b, K, K)
        Gaussians over the logits, without the variance beyond ``2 n_draws / K``.
    """
    k = cov.shape[-1]
    variances = cov.diagonal(dim1=-2, dim2=-1)
    # A softmax ignores constants that are added to all entries of a covariance. Without
    # the mean covariance, the remainder is as close to a diagonal as possible.
    # mean of the K (K − 1) covariances, of which a single class has none
    constant = (cov.sum((-2, -1)) - variances.sum(-1)) / max(k * (k - 1), 1)
    shifted = cov - constant[:, None, None]
    variances = shifted.diagonal(dim1=-2, dim2=-1)
    # a lower bound of all eigenvalues (Gershgorin), up to rounding, and therefore a
    # variance that every logit has, independently of the others
    radii = shifted.abs().sum(-1) - variances.abs()
    common = (1 - 1e-13) * (variances - radii).amin(-1)
    excess = (common - 2 * n_draws / k).clamp(min=0)
    scale = (1 + _COMMON_SCALES.get(k, math.pi / 8) * excess).sqrt()
    # like `probit`, the scale replaces the variance that is subtracted
    identity = torch.eye(k).to(cov)
    cov = (cov - excess[:, None, None] * identity) / scale.square()[:, None, None]
    return mean / scale.unsqueeze(-1), cov


def _probit_scale(variances: Tensor) -> Tensor:
    """Return ``√(1 + π v / 8)``, the divisor of a logit with variance ``v``."""
    return (1 + math.pi / 8 * variances.clamp(min=0)).sqrt()

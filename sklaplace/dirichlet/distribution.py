"""Properties of Dirichlet distributions with concentrations ``α`` and total ``A``."""

import numpy as np
import torch
from scipy.special import betaincinv
from torch import Tensor
from torch.distributions import Dirichlet

from sklaplace.core import checks
from sklaplace.core.random import RandomState
from sklaplace.dirichlet import arrays
from sklaplace.dirichlet.arrays import Array, check_alpha, like

# Values of the parameter ``reference`` of `plausible_classes`.
REFERENCES = ("top", "previous")
# Above this total, SciPy is inaccurate, and Beta quantiles change by less than 1e-6.
_MAX_QUANTILE_TOTAL = 1e12


def mean(alpha: Array) -> Array:
    """Compute the expected class probabilities of a Dirichlet.

    Read more in the :ref:`User Guide <dirichlet>`.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.

    Returns
    -------
    Tensor or ndarray of shape (..., K)
        Float64 means ``α / A`` with the total ``A = Σ_k α_k``.

    Raises
    ------
    ValueError
        If a concentration is not positive.

    See Also
    --------
    variance : Marginal variances.
    interval : Central intervals.

    Examples
    --------
    >>> from sklaplace.dirichlet import mean
    >>> mean([[6.0, 3.0, 1.0]])
    array([[0.6, 0.3, 0.1]])
    """
    concentrations = check_alpha(alpha)
    return like(concentrations / concentrations.sum(-1, keepdim=True), alpha)


def variance(alpha: Array) -> Array:
    """Compute the marginal variances of a Dirichlet's class probabilities.

    Read more in the :ref:`User Guide <dirichlet>`.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.

    Returns
    -------
    Tensor or ndarray of shape (..., K)
        Float64 variances (not standard deviations) ``m (1 − m) / (A + 1)``, with
        ``m = α / A`` and ``A = Σ_k α_k``.

    Raises
    ------
    ValueError
        If a concentration is not positive.

    See Also
    --------
    mean : Expected probabilities.
    interval : Central intervals.

    Examples
    --------
    >>> from sklaplace.dirichlet import variance
    >>> variance([[6.0, 3.0, 1.0]]).round(3)
    array([[0.022, 0.019, 0.008]])
    """
    concentrations = check_alpha(alpha)
    total = concentrations.sum(-1, keepdim=True)
    expected = concentrations / total
    return like(expected * (1 - expected) / (total + 1), alpha)


def entropy(alpha: Array) -> Array:
    """Compute the differential entropy of a Dirichlet, in nats.

    The entropy is negative, except for the uniform distribution over two classes, where
    it is zero. For the entropy of the label, see `expected_entropy`.

    Read more in the :ref:`User Guide <dirichlet>`.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.

    Returns
    -------
    Tensor or ndarray of shape (...,)
        Float64 entropies
        ``Σ logΓ(α_k) − logΓ(A) + (A − K) ψ(A) − Σ (α_k − 1) ψ(α_k)``.

    Raises
    ------
    ValueError
        If a concentration is not positive.

    See Also
    --------
    expected_entropy : Expected entropy of the label.
    uncertainty : Decomposition of the label's entropy.

    Examples
    --------
    >>> from sklaplace.dirichlet import entropy
    >>> entropy([[6.0, 3.0, 1.0]]).round(2)
    array([-1.94])
    """
    return like(Dirichlet(check_alpha(alpha), validate_args=False).entropy(), alpha)


def expected_entropy(alpha: Array) -> Array:
    """Compute the expected entropy of a label given its probabilities, in nats.

    Read more in the :ref:`User Guide <dirichlet>`.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.

    Returns
    -------
    Tensor or ndarray of shape (...,)
        Float64 entropies ``E[−Σ π_k log π_k] = ψ(A + 1) − Σ (α_k / A) ψ(α_k + 1)``,
        between zero and ``log K``.

    Raises
    ------
    ValueError
        If a concentration is not positive.

    See Also
    --------
    uncertainty : Decomposition of the label's entropy.
    entropy : Differential entropy of the Dirichlet.

    Examples
    --------
    >>> from sklaplace.dirichlet import expected_entropy
    >>> expected_entropy([[6.0, 3.0, 1.0]]).round(2)
    array([0.81])
    """
    a = check_alpha(alpha)
    total = a.sum(-1, keepdim=True)
    terms = a / total * ((total + 1).digamma() - (a + 1).digamma())
    return like(terms.sum(-1), alpha)


def log_density(alpha: Array, proba: Array) -> Array:
    """Compute the log-density of a Dirichlet at given class probabilities.

    Read more in the :ref:`User Guide <dirichlet>`.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.
    proba : Tensor or ndarray of shape (..., K)
        Probabilities that sum to one. Leading axes are broadcast.

    Returns
    -------
    Tensor or ndarray of shape (...,)
        Float64 log-densities with respect to the Lebesgue measure of the first K − 1
        probabilities. If a probability is zero, the value is ``-inf`` for a
        concentration above one, and ``inf`` for a concentration below one. If both
        cases occur in a row, the value is ``nan``, because the density has no limit.

    Raises
    ------
    ValueError
        If a concentration is not positive, or ``proba`` does not contain probabilities.

    See Also
    --------
    sample : Draws from a Dirichlet.
    sklaplace.plotting.DirichletDisplay : Plot of the density over three probabilities.

    Examples
    --------
    >>> from sklaplace.dirichlet import log_density
    >>> log_density([[1.0, 1.0, 1.0]], [[0.2, 0.3, 0.5]]).round(3)  # log 2
    array([0.693])
    """
    a = check_alpha(alpha)
    p = arrays.check_proba(proba, a)
    return like(Dirichlet(a, validate_args=False).log_prob(p), alpha)


def interval(alpha: Array, coverage: float = 0.9) -> Array:
    """Compute central credible intervals of the class probabilities.

    Read more in the :ref:`User Guide <dirichlet>`.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.
    coverage : float, default=0.9
        Marginal probability of each interval, in (0, 1).

    Returns
    -------
    Tensor or ndarray of shape (..., K, 2)
        Float64 lower and upper bounds, which are quantiles of ``Beta(α_k, A − α_k)``.

    Raises
    ------
    ValueError
        If a concentration is not positive, or ``coverage`` is not in (0, 1).

    See Also
    --------
    mean : Expected probabilities.
    plausible_classes : Classes that may be the most probable.

    Notes
    -----
    SciPy computes the quantiles on the CPU. Each quantile takes about a microsecond.

    Examples
    --------
    >>> from sklaplace.dirichlet import interval
    >>> interval([[60.0, 30.0, 10.0]], coverage=0.9).round(2)
    array([[[0.52, 0.68],
            [0.23, 0.38],
            [0.06, 0.15]]])
    """
    hint = "Choose a probability, such as 0.9."
    tail = (1 - checks.check_fraction("coverage", coverage, hint)) / 2
    a = check_alpha(alpha)
    ends = [_marginal_quantile(a, a.sum(-1, keepdim=True), q) for q in (tail, 1 - tail)]
    return like(torch.stack(ends, -1), alpha)


def sample(
    alpha: Array,
    n_samples: int = 1,
    random_state: RandomState = 0,
) -> Array:
    """Draw class probabilities from a Dirichlet.

    Read more in the :ref:`User Guide <dirichlet>`.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.
    n_samples : int, default=1
        Number of draws.
    random_state : int, RandomState or None, default=0
        Seed of the draws. With None, each call returns different draws. Global random
        generators are not used.

    Returns
    -------
    Tensor or ndarray of shape (n_samples, ..., K)
        Float64 draws, generated on the CPU. Each row sums to one.

    Raises
    ------
    ValueError
        If a concentration or ``n_samples`` is not positive.

    See Also
    --------
    log_density : Log-density of the Dirichlet.

    Notes
    -----
    Draws are computed from logarithms of gamma variables. Small concentrations
    therefore produce one-hot probabilities instead of NaN from zero divided by zero.

    Examples
    --------
    >>> from sklaplace.dirichlet import sample
    >>> sample([[6.0, 3.0, 1.0]], n_samples=5, random_state=0).shape
    (5, 1, 3)
    """
    n_samples = checks.check_count("n_samples", n_samples)
    a = check_alpha(alpha)
    generator = checks.as_generator(random_state)
    # shape parameters of gamma variables, (n_samples, ..., K), on the generator's CPU
    shapes = a.detach().cpu().expand(n_samples, *a.shape).contiguous()
    # Normalised gamma variables G(α) follow a Dirichlet. Those of small concentrations
    # underflow, so only their logarithms are computed.
    # G(α) = G(α + 1) U^(1/α): Marsaglia and Tsang (2000), section 6
    # the public Gamma distribution does not accept a generator
    gamma = torch._standard_gamma(shapes + 1, generator=generator)
    uniform = torch.rand(shapes.shape, dtype=shapes.dtype, generator=generator)
    # a uniform variable can be zero, which has no logarithm
    logs = gamma.log() + uniform.clamp(min=2**-60).log() / shapes
    return like(logs.softmax(-1).to(a.device), alpha)


def uncertainty(alpha: Array) -> Array:
    """Decompose the entropy of a label into aleatoric and epistemic uncertainty.

    Read more in the :ref:`User Guide <dirichlet>`.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.

    Returns
    -------
    Tensor or ndarray of shape (..., 3)
        Float64 entropies in nats: the entropy of the mean (total), the
        `expected_entropy` (aleatoric), and their difference (epistemic). The difference
        is the mutual information between the label and the probabilities.

    Raises
    ------
    ValueError
        If a concentration is not positive.

    See Also
    --------
    expected_entropy : Aleatoric part.
    sklaplace.LaplaceClassifier.predict_uncertainty : Uncertainty of predictions.

    References
    ----------
    Depeweg, Hernández-Lobato, Doshi-Velez and Udluft (2018), "Decomposition of
    uncertainty in Bayesian deep learning for efficient and risk-sensitive learning".

    Examples
    --------
    >>> from sklaplace.dirichlet import uncertainty
    >>> uncertainty([[6.0, 3.0, 1.0], [600.0, 300.0, 100.0]]).round(2)
    array([[0.9 , 0.81, 0.09],
           [0.9 , 0.9 , 0.  ]])
    """
    a = check_alpha(alpha)
    return like(split_entropy(mean(a), expected_entropy(a)), alpha)


def split_entropy(average: Tensor, aleatoric: Tensor) -> Tensor:
    """Return total, aleatoric and epistemic entropies, of shape (..., 3).

    The inputs are mean probabilities (..., K) and expected entropies (...).
    """
    total = -torch.special.xlogy(average, average).sum(-1)
    # entropy is concave, so only rounding makes the mean entropy larger than the total
    aleatoric = torch.minimum(aleatoric, total)
    # adding 0.0 removes negative zeros
    return torch.stack([total, aleatoric, total - aleatoric], -1) + 0.0


def plausible_classes(
    alpha: Array, q: float = 0.05, k_max: int = 10, reference: str = "top"
) -> Array:
    """Select the classes that may be the most probable (uncertainty-aware top-k).

    A class belongs to the set if the upper quantile of its marginal Beta distribution
    is at least the lower quantile of the most probable class.

    Read more in the :ref:`User Guide <dirichlet>`.

    Parameters
    ----------
    alpha : Tensor or ndarray of shape (..., K)
        Positive concentrations.
    q : float, default=0.05
        Tail probability of both quantiles. Larger values lead to smaller sets. With 0.5
        or more, the set contains only the most probable class.
    k_max : int, default=10
        Maximum number of classes in a set.
    reference : {"top", "previous"}, default="top"
        Class with which each class is compared: the most probable class (``"top"``) or
        the preceding class in descending order of probability (``"previous"``, also
        called "next class"). ``"previous"`` leads to larger sets, which end at the
        first clear gap between consecutive classes.

    Returns
    -------
    Tensor or ndarray of shape (..., K)
        Boolean mask of the set, which always includes the most probable class. Ties are
        broken by class order.

    Raises
    ------
    ValueError
        If a concentration is not positive, or an option is invalid.

    See Also
    --------
    interval : Central intervals.
    sklaplace.LaplaceClassifier.predict_set : Set of plausible classes for each sample.

    Notes
    -----
    Each sample requires 2 k_max Beta quantiles. ``Beta(a, A − a)`` is stochastically
    increasing in ``a``, so the members of the set are the first classes in descending
    order of concentration.

    References
    ----------
    Hobbhahn, Kristiadi, Hennig (2022), "Fast predictive uncertainty for classification
    with Bayesian deep networks", UAI, section 4.

    Examples
    --------
    >>> from sklaplace.dirichlet import plausible_classes
    >>> plausible_classes([[6.0, 3.0, 1.0], [600.0, 300.0, 100.0]])
    array([[ True,  True, False],
           [ True, False, False]])
    """
    q, k_max = check_set(q, k_max, reference)
    a = check_alpha(alpha)
    order = a.argsort(dim=-1, descending=True, stable=True)[..., :k_max]
    # the candidates in descending order; the first is always a member
    leading, total = a.gather(-1, order), a.sum(-1, keepdim=True)
    upper = _marginal_quantile(leading[..., 1:], total, 1 - q)
    compared_to = leading[..., :1] if reference == "top" else leading[..., :-1]
    overlaps = upper >= _marginal_quantile(compared_to, total, q)
    # The set ends at the first class that does not overlap. For q >= 0.5, the quantiles
    # cross, even for equal classes.
    is_member = (overlaps & (q < 0.5)).cumprod(-1).bool()
    # from the descending order back to the order of the classes
    members = torch.zeros_like(a, dtype=torch.bool)
    members.scatter_(-1, order[..., :1], True)
    return like(members.scatter(-1, order[..., 1:], is_member), alpha)


def check_set(q: float, k_max: int, reference: str) -> tuple[float, int]:
    """Return ``q`` and ``k_max``; raise ValueError for invalid options."""
    checks.check_option("reference", reference, REFERENCES)
    hint = "Choose a small tail probability, such as 0.05."
    return checks.check_fraction("q", q, hint), checks.check_count("k_max", k_max)


def _marginal_quantile(a: Tensor, total: Tensor, q: float) -> Tensor:
    """Return the quantiles at level ``q`` of ``Beta(a, A − a)``, in the shape of ``a``.

    Concentrations with a large total are reduced, without changing their mean.
    """
    # rounding can make A − a zero, which is no parameter of a Beta distribution
    factor = (_MAX_QUANTILE_TOTAL / total).clamp(max=1)
    a, rest = a * factor, ((total - a) * factor).clamp(min=arrays.MIN_CONCENTRATION)
    x = betaincinv(a.detach().cpu().numpy(), rest.detach().cpu().numpy(), q)
    return torch.from_numpy(np.asarray(x)).to(a.device)

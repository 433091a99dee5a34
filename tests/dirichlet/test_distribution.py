"""Properties of Dirichlet distributions, checked with scipy, sampling and loops."""

import numpy as np
import pytest
import torch
from dirichlets import ALPHAS, FUNCTIONS
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sklaplace import dirichlet

pytestmark = pytest.mark.usefixtures("rng_untouched")

TINY, HUGE = 1e-100, 1e9
concentrations = st.lists(st.floats(-100, 8), min_size=1, max_size=12).map(
    lambda logs: 10.0 ** np.array(logs)
)
every_function = pytest.mark.parametrize(
    "function", FUNCTIONS.values(), ids=FUNCTIONS.keys()
)


def label_entropy(proba):
    return stats.entropy(proba, axis=-1)


# All of them


@every_function
@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_concentrations_must_be_positive(function, value):
    with pytest.raises(ValueError, match=rf"contains {value}.*positive and finite"):
        function(np.array([[1.0, 2.0], [1.0, value]]))
    with pytest.raises(ValueError, match=r"alpha is a scalar"):
        function(np.array(2.0))


@every_function
@given(alpha=concentrations)
def test_finite_for_all_concentrations_of_this_library(function, alpha):
    """Concentrations range from 1e-100 to a total of 1e9; densities may be infinite."""
    if function is FUNCTIONS["log_density"]:
        found = dirichlet.log_density(alpha, np.full(len(alpha), 1 / len(alpha)))
    else:
        found = function(alpha)
    assert np.isfinite(found).all()


# Moments and entropies


def test_equal_to_scipy():
    functions = (dirichlet.mean, dirichlet.variance, dirichlet.entropy)
    found = [function(ALPHAS) for function in functions]
    for index in np.ndindex(2, 5):
        twin = stats.dirichlet(ALPHAS[index])
        expected = twin.mean(), twin.var(), twin.entropy()
        for values, value in zip(found, expected, strict=True):
            # differences of logΓ lose a few digits
            np.testing.assert_allclose(values[index], value, rtol=1e-11, atol=1e-12)


def test_density_equals_scipy():
    proba = np.random.default_rng(1).dirichlet(np.ones(4), size=5)
    found = dirichlet.log_density(ALPHAS, proba)  # leading axes are broadcast
    for i, k in np.ndindex(2, 5):
        expected = stats.dirichlet(ALPHAS[i, k]).logpdf(proba[k])
        np.testing.assert_allclose(found[i, k], expected, rtol=1e-11)
    one = dirichlet.log_density(ALPHAS[0, 0], proba)
    assert one.shape == (5,)
    single = dirichlet.log_density(np.array([3.0]), np.array([1.0]))
    assert single == pytest.approx(0, abs=1e-14)


def test_density_where_probabilities_are_zero():
    alpha = np.array([[2.0, 3.0], [1.0, 3.0], [0.5, 3.0]])
    found = dirichlet.log_density(alpha, np.array([0.0, 1.0]))
    # Beta(1, 3) has the density 3 there
    np.testing.assert_allclose(found, [-np.inf, np.log(3), np.inf])
    both = dirichlet.log_density(np.array([2, 0.5, 3]), np.array([0.0, 0, 1]))
    assert np.isnan(both)


@pytest.mark.parametrize(
    ("proba", "message"),
    [
        ([0.5, 0.2, 0.2], r"do not sum to one\. Pass"),
        ([1.2, -0.2, 0.0], r"negative entries"),
        ([np.nan, 0.5, 0.5], r"negative entries or rows that do not sum to one"),
        ([0.5, 0.5], r"proba has shape \(2,\), but alpha has shape \(3,\)\. Pass one"),
        (1.0, r"proba has shape \(\), but"),
    ],
)
def test_density_at_what_are_no_probabilities(proba, message):
    with pytest.raises(ValueError, match=message):
        dirichlet.log_density(np.ones(3), np.array(proba))


def test_split_of_the_entropy_equals_that_of_draws():
    draws = np.random.default_rng(0).dirichlet(ALPHAS[0, 0], size=40_000)
    total, aleatoric, epistemic = dirichlet.uncertainty(ALPHAS[0, 0])
    entropies = label_entropy(draws)
    bound = 5 * entropies.std() / 200
    assert aleatoric == pytest.approx(entropies.mean(), abs=bound)
    assert total == pytest.approx(label_entropy(ALPHAS[0, 0] / ALPHAS[0, 0].sum()))
    assert epistemic == pytest.approx(total - aleatoric, abs=1e-15)
    assert dirichlet.expected_entropy(ALPHAS[0, 0]) == aleatoric


# Intervals


def test_intervals_equal_scipys():
    for coverage in (0.5, 0.9, 0.999):
        found = dirichlet.interval(ALPHAS, coverage)
        assert found.shape == (*ALPHAS.shape, 2)
        marginal = stats.beta(ALPHAS, ALPHAS.sum(-1, keepdims=True) - ALPHAS)
        expected = np.stack(marginal.interval(coverage), -1)
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert (dirichlet.interval(ALPHAS) == dirichlet.interval(ALPHAS, 0.9)).all()


# Draws


def test_draws_have_the_moments():
    alpha = ALPHAS[0, :2]
    draws = dirichlet.sample(alpha, 40_000)
    assert draws.shape == (40_000, 2, 4)
    np.testing.assert_allclose(draws.sum(-1), 1, rtol=1e-12)
    variance = dirichlet.variance(alpha)
    # five standard errors; kurtosis of a Beta distribution is below 10 here
    bound = 5 * np.sqrt(variance) / 200
    assert (np.abs(draws.mean(0) - dirichlet.mean(alpha)) < bound).all()
    np.testing.assert_allclose(draws.var(0), variance, rtol=5 * 3 / 200)
    # not only moments: the first class is distributed as a Beta variable
    marginal = stats.beta(alpha[0, 0], alpha[0].sum() - alpha[0, 0])
    assert stats.kstest(draws[:, 0, 0], marginal.cdf).pvalue > 1e-3


def test_draws_of_small_concentrations():
    """A Gamma variable may be below the smallest floating-point number."""
    alpha = np.array([0.01, 0.03])
    draws = dirichlet.sample(alpha, 20_000)[:, 0]
    points = np.array([1e-150, 1e-50, 1e-5, 0.5, 1 - 1e-10])
    share = (draws[:, None] < points).mean(0)
    expected = stats.beta(*alpha).cdf(points)
    bound = 5 * np.sqrt(expected * (1 - expected) / 20_000)
    assert (np.abs(share - expected) < bound).all()


def test_draws_of_a_seed():
    first = dirichlet.sample(ALPHAS, 3)
    np.testing.assert_array_equal(first, dirichlet.sample(ALPHAS, 3, random_state=0))
    assert dirichlet.sample(ALPHAS).shape == (1, *ALPHAS.shape)
    assert not np.allclose(first[0], first[1])
    assert not np.allclose(first, dirichlet.sample(ALPHAS, 3, random_state=1))
    fresh = [dirichlet.sample(ALPHAS, 3, random_state=None) for _ in range(2)]
    assert not np.allclose(*fresh)
    states = [np.random.RandomState(4) for _ in range(2)]
    drawn = [dirichlet.sample(ALPHAS, 3, random_state=state) for state in states]
    np.testing.assert_array_equal(*drawn)
    assert not np.allclose(drawn[0], dirichlet.sample(ALPHAS, 3, states[0]))


# Sets


def by_loop(alpha, q, k_max, reference):
    """Return, for one row, the classes that may be the most probable class."""
    total = alpha.sum()
    order = sorted(range(len(alpha)), key=lambda k: -alpha[k])  # stable
    members = [order[0]]
    for place, k in enumerate(order[1:k_max], start=1):
        before = order[0] if reference == "top" else order[place - 1]
        lower = stats.beta.ppf(q, alpha[before], total - alpha[before])
        upper = stats.beta.ppf(1 - q, alpha[k], total - alpha[k])
        if upper < lower:
            break
        members.append(k)
    mask = np.zeros(len(alpha), dtype=bool)
    mask[members] = True
    return mask


def rows_of(n_classes, n=60):
    """Return concentrations from flat to peaked, with small to large totals."""
    rng = np.random.default_rng(n_classes)
    shapes = rng.dirichlet(np.full(n_classes, 0.5), size=n) + 1e-3
    return shapes * 10 ** rng.uniform(0, 4, size=(n, 1))


@pytest.mark.parametrize("reference", ["top", "previous"])
@pytest.mark.parametrize("n_classes", [2, 3, 12])
@pytest.mark.parametrize("q", [0.001, 0.05, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("k_max", [1, 2, 10, 100])
def test_sets_equal_a_loop(n_classes, q, k_max, reference):
    alpha = rows_of(n_classes)
    found = dirichlet.plausible_classes(alpha, q, k_max, reference)
    expected = [by_loop(row, q, k_max, reference) for row in alpha]
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == bool
    assert found.any(-1).all()
    assert (found.sum(-1) <= k_max).all()
    np.testing.assert_array_equal(found[np.arange(60), alpha.argmax(-1)], True)


NOT_BETWEEN = "=.* is not between 0 and 1"
SETS = dirichlet.plausible_classes
REFUSED = [
    (dirichlet.interval, "coverage", 1.5, NOT_BETWEEN),
    (dirichlet.interval, "coverage", "0.9", NOT_BETWEEN),
    (dirichlet.sample, "n_samples", 0, "=.* is not an integer of at least"),
    (dirichlet.sample, "random_state", 1.5, "=.*cannot seed a generator"),
    (SETS, "q", 0, r"=0 is not between 0 and 1\. Choose a small tail probability"),
    (SETS, "k_max", 0, "=0 is not an integer of at least 1"),
    (SETS, "reference", "next", "='next' is not known.*'previous', 'top'"),
]


@pytest.mark.parametrize(("function", "name", "value", "message"), REFUSED)
def test_options_are_refused_by_name(function, name, value, message):
    with pytest.raises(ValueError, match=f"^{name}{message}"):
        function(ALPHAS, **{name: value})


def test_derivatives():
    alpha = torch.tensor(ALPHAS[0], requires_grad=True)
    for name in ("mean", "variance", "entropy", "expected_entropy", "uncertainty"):
        assert torch.autograd.gradcheck(FUNCTIONS[name], (alpha,))
    proba = torch.tensor(dirichlet.mean(ALPHAS[0]))
    assert torch.autograd.gradcheck(lambda a: dirichlet.log_density(a, proba), (alpha,))
    # draws and quantiles have none, and do not fail
    dirichlet.sample(alpha)
    dirichlet.interval(alpha)
    dirichlet.plausible_classes(alpha)


@pytest.mark.parametrize("size", [1e308, 5e-324])
def test_extreme_concentrations_have_finite_answers(size):
    alpha = np.full((2, 3), size)
    np.testing.assert_allclose(dirichlet.mean(alpha), 1 / 3)
    for name in FUNCTIONS.keys() - {"log_density", "plausible_classes"}:
        assert np.isfinite(FUNCTIONS[name](alpha)).all()

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sklaplace import dirichlet
from sklaplace.dirichlet import NORMS, inverse_bridge, laplace_bridge

pytestmark = pytest.mark.numerical

CORRELATED = [[1, 0, 0.5], [0, 2, 0.3], [0.5, 0.3, 0.5]]
OPTIONS = [
    {"project": project, "norm": norm}
    for project in (False, True)
    for norm in (None, *NORMS)
]


def gaussian(rows, n_classes, seed, scale=1.0):
    """Means (b, K) and random full-rank covariances (b, K, K)."""
    rng = np.random.default_rng(seed)
    factors = rng.normal(size=(rows, n_classes, n_classes))
    covariances = scale * factors @ factors.transpose(0, 2, 1) / n_classes
    return 2 * rng.normal(size=(rows, n_classes)), covariances


def projected(mean, cov):
    """Mean and covariance given a sum of zero, as the formulas are printed."""
    ones = np.ones(len(mean))
    total = ones @ cov @ ones
    mean = mean - cov @ ones * (ones @ mean) / total
    return mean, cov - np.outer(cov @ ones, ones @ cov) / total


@pytest.mark.parametrize(
    ("mean", "cov", "expected"),
    [
        ([0, 0, 0], 0.1 * np.eye(3), [6.667, 6.667, 6.667]),
        ([2, -1, -1], np.eye(3), [4.908, 0.561, 0.561]),
        ([1, 1, -2], CORRELATED, [2.787, 1.394, 0.911]),
    ],
)
def test_published_gaussians_have_published_concentrations(mean, cov, expected):
    # The paper's figures are those of the Gaussians as printed, not projected.
    alpha = laplace_bridge(np.array(mean), np.array(cov), project=False)
    np.testing.assert_allclose(alpha, expected, atol=5e-4)


@pytest.mark.parametrize("n_classes", [2, 3, 7])
def test_bridge_equals_its_formula(n_classes):
    mean, cov = (values[0] for values in gaussian(1, n_classes, seed=0))
    m, s = projected(mean, cov)
    constant = 1 - 2 / n_classes + np.exp(m) * np.exp(-m).sum() / n_classes**2
    np.testing.assert_allclose(laplace_bridge(mean, cov), constant / s.diagonal())

    c = s.diagonal().mean() / np.sqrt(n_classes / 2)
    for norm, divisor in (("published", c), ("guarded", max(c, 1))):
        expected = laplace_bridge(m / np.sqrt(divisor), s / divisor, project=False)
        np.testing.assert_allclose(laplace_bridge(mean, cov, norm=norm), expected)


def test_guard_only_prevents_sharpening():
    mean, small = gaussian(5, 4, seed=1, scale=0.01)
    large = 1e4 * small
    np.testing.assert_array_equal(
        laplace_bridge(mean, small, norm="guarded"), laplace_bridge(mean, small)
    )
    np.testing.assert_array_equal(
        laplace_bridge(mean, large, norm="guarded"),
        laplace_bridge(mean, large, norm="published"),
    )


@given(
    alpha=st.integers(2, 8).flatmap(
        lambda k: st.lists(st.floats(-4, 4), min_size=k, max_size=k)
    )
)
def test_round_trip_from_concentrations(alpha):
    alpha = 10.0 ** np.array(alpha)
    mean, cov = inverse_bridge(alpha)
    for project in (False, True):
        np.testing.assert_allclose(
            laplace_bridge(mean, cov, project=project), alpha, rtol=1e-12
        )


def test_inverse_bridge_is_centred_and_semidefinite():
    mean, cov = inverse_bridge(np.array([0.3, 2.0, 5.0, 40.0]))
    assert abs(mean.sum()) < 1e-14
    np.testing.assert_allclose(cov.sum(axis=0), 0, atol=1e-14)
    np.testing.assert_array_equal(cov, cov.T)
    assert np.linalg.eigvalsh(cov).min() > -1e-14


def test_projection_leaves_centred_gaussians_alone():
    mean, cov = gaussian(6, 5, seed=2)
    centring = np.eye(5) - 1 / 5
    mean, cov = mean @ centring, centring @ cov @ centring
    np.testing.assert_allclose(
        laplace_bridge(mean, cov), laplace_bridge(mean, cov, project=False), rtol=1e-12
    )
    # In float32 the sums that should vanish are larger, and must not be divided by.
    np.testing.assert_allclose(
        laplace_bridge(mean.astype("f4"), cov.astype("f4")),
        laplace_bridge(mean, cov),
        rtol=1e-5,
    )


@pytest.mark.parametrize("options", OPTIONS)
@given(
    n_classes=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    rank=st.integers(0, 6),
    log_mean=st.integers(-6, 6),
    log_scale=st.integers(-12, 12),
    log_common=st.integers(-12, 12),
)
def test_finite_positive_and_bounded(
    options, n_classes, seed, rank, log_mean, log_scale, log_common
):
    rng = np.random.default_rng(seed)
    factor = rng.normal(size=(n_classes, min(rank, n_classes)))
    cov = 10.0**log_scale * factor @ factor.T + 10.0**log_common
    alpha = laplace_bridge(10.0**log_mean * rng.normal(size=n_classes), cov, **options)
    assert np.isfinite(alpha).all()
    assert (alpha > 0).all()
    assert alpha.sum() <= 1e9 * (1 + 1e-12)
    np.testing.assert_allclose(dirichlet.mean(alpha).sum(), 1)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("scale", [0.0, 1e-299, 1e299])
@pytest.mark.parametrize("largest", [0.0, 1e300])
def test_finite_at_the_limits_of_float64(options, scale, largest):
    mean = np.array([largest, -largest, 0])
    alpha = laplace_bridge(mean, scale * np.eye(3), **options)
    assert np.isfinite(alpha).all()
    assert (alpha > 0).all()


def test_cap_keeps_the_mean():
    mean, cov = gaussian(4, 3, seed=3)
    expected = dirichlet.mean(laplace_bridge(mean, cov))
    capped = laplace_bridge(mean, 1e-14 * cov)
    np.testing.assert_allclose(capped.sum(axis=-1), 1e9)
    np.testing.assert_allclose(dirichlet.mean(capped), expected, rtol=1e-11)


def test_rounding_left_by_a_common_shift_says_nothing():
    alpha = laplace_bridge(np.zeros(3), np.full((3, 3), 0.1))
    np.testing.assert_allclose(dirichlet.mean(alpha), 1 / 3)


@pytest.mark.parametrize("options", OPTIONS)
def test_one_class_has_concentration_one(options):
    alpha = laplace_bridge(np.array([[3.0], [-1e6]]), np.ones((2, 1, 1)), **options)
    np.testing.assert_array_equal(alpha, np.ones((2, 1)))


def test_two_classes_keep_the_softmax():
    mean, cov = gaussian(20, 2, seed=4)
    alpha = laplace_bridge(mean, cov, project=False)
    np.testing.assert_allclose(
        dirichlet.mean(alpha)[:, 0] / dirichlet.mean(alpha)[:, 1],
        np.exp(mean[:, 0] - mean[:, 1]) * cov[:, 1, 1] / cov[:, 0, 0],
    )
    centring = np.eye(2) - 0.5
    centred = dirichlet.mean(laplace_bridge(mean, centring @ cov @ centring))
    softmax = 1 / (1 + np.exp(mean[:, 1] - mean[:, 0]))
    np.testing.assert_allclose(centred[:, 0], softmax)


def test_moments_equal_those_of_scipy():
    alpha = np.random.default_rng(0).gamma(1.0, 3.0, size=(2, 5, 4))
    for index in np.ndindex(2, 5):
        twin = stats.dirichlet(alpha[index])
        np.testing.assert_allclose(dirichlet.mean(alpha)[index], twin.mean())
        np.testing.assert_allclose(dirichlet.variance(alpha)[index], twin.var())


def test_tensors_and_arrays_come_back_as_given_and_unchanged():
    mean, cov = gaussian(6, 3, seed=5)
    copies = mean.copy(), cov.copy()
    mean.flags.writeable = cov.flags.writeable = False
    alpha = laplace_bridge(mean, cov, norm="published")
    assert isinstance(alpha, np.ndarray)
    np.testing.assert_array_equal(mean, copies[0])
    np.testing.assert_array_equal(cov, copies[1])

    tensors = torch.tensor(mean), torch.tensor(cov)
    twin = laplace_bridge(*tensors, norm="published")
    assert isinstance(twin, torch.Tensor)
    np.testing.assert_array_equal(twin.numpy(), alpha)
    np.testing.assert_array_equal(tensors[0].numpy(), mean)
    np.testing.assert_array_equal(tensors[1].numpy(), cov)
    for function in (dirichlet.mean, dirichlet.variance, inverse_bridge):
        of_array, of_tensor = function(alpha), function(twin)
        pairs = (
            zip(of_array, of_tensor, strict=True)
            if isinstance(of_array, tuple)
            else [(of_array, of_tensor)]
        )
        for array, tensor in pairs:
            assert isinstance(array, np.ndarray)
            assert isinstance(tensor, torch.Tensor)
            np.testing.assert_array_equal(array, tensor.numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64])
def test_results_are_float64(dtype):
    mean = torch.tensor([2, -1, -1], dtype=dtype)
    alpha = laplace_bridge(mean, torch.eye(3, dtype=dtype))
    assert alpha.dtype == dirichlet.mean(alpha).dtype == torch.float64


def test_leading_axes_are_batches():
    mean, cov = gaussian(6, 3, seed=6)
    alpha = laplace_bridge(mean.reshape(2, 3, 3), cov.reshape(2, 3, 3, 3))
    singly = [laplace_bridge(*row) for row in zip(mean, cov, strict=True)]
    np.testing.assert_allclose(alpha.reshape(6, 3), singly, rtol=1e-14)
    assert laplace_bridge(np.empty((0, 3)), np.empty((0, 3, 3))).shape == (0, 3)


def test_tensors_stay_differentiable():
    mean, cov = map(torch.tensor, gaussian(2, 3, seed=7))
    mean.requires_grad_()
    assert torch.autograd.gradcheck(laplace_bridge, (mean, cov))


@pytest.mark.parametrize(
    ("mean", "cov", "norm", "message"),
    [
        ((3,), (3, 3), "guard", r"norm='guard' is not known.*'guarded', 'published'"),
        ((4, 3), (3, 3), None, r"cov has shape \(3, 3\).*the shape \(4, 3, 3\)"),
        ((3,), (3,), None, r"cov has shape \(3,\), but mean has shape \(3,\)"),
        ((), (), None, r"mean is a scalar. Give logits of shape \(\.\.\., K\)"),
    ],
)
def test_bridge_names_what_is_wrong(mean, cov, norm, message):
    with pytest.raises(ValueError, match=message):
        laplace_bridge(np.ones(mean), np.ones(cov), norm=norm)


@pytest.mark.parametrize(
    "function", [dirichlet.mean, dirichlet.variance, inverse_bridge]
)
@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_concentrations_must_be_positive(function, value):
    with pytest.raises(ValueError, match=rf"entry {value}.*positive and finite"):
        function(np.array([1.0, value]))
    with pytest.raises(ValueError, match=r"alpha is a scalar"):
        function(np.array(2.0))


@pytest.mark.parametrize("function", [laplace_bridge, dirichlet.kl_projection])
@pytest.mark.parametrize(
    ("mean", "cov", "message"),
    [
        ([0, np.nan, 0], np.eye(3), "mean has entries that are not finite"),
        ([0, np.inf, 0], np.eye(3), "mean has entries that are not finite"),
        ([0, 0, 0], np.full((3, 3), np.nan), "cov has entries that are not finite"),
        ([0, 0, 0], np.diag([1, np.inf, 1]), "cov has entries that are not finite"),
        ([0, 0, 0], [[1, np.nan, 0], [np.nan, 1, 0], [0, 0, 1]], "cov .* not finite"),
        ([0, 0, 0], -np.eye(3), "cov is not positive semidefinite"),
        ([0, 0], [[1, 2], [2, 1]], "cov is not positive semidefinite"),
    ],
)
def test_gaussians_must_be_gaussians(function, mean, cov, message):
    with pytest.raises(ValueError, match=message):
        function(np.array(mean, dtype=float), np.array(cov, dtype=float))


def test_variances_must_not_be_negative():
    with pytest.raises(ValueError, match="cov is not positive semidefinite"):
        laplace_bridge(np.zeros(3), np.diag([1, -0.1, 1]))
    with pytest.raises(ValueError, match="cov is not positive semidefinite"):
        laplace_bridge(np.zeros(3), np.array([1, -0.1, 1]), project=False)

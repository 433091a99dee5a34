import math

import contracts
import numpy as np
import pytest
import references
import torch
from cases import normal
from contracts import assert_equal
from torch import nn

from sklaplace.likelihoods import (
    CRITERIA,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    HeteroscedasticNLLLoss,
    Poisson,
)

every_likelihood = pytest.mark.parametrize("name", references.LIKELIHOODS)

SIGMA = torch.tensor(0.6, dtype=torch.float64)


def outputs(name, n=40, size=2.0):
    c = references.reference(references.LIKELIHOODS[name]).n_outputs
    if name in ("Poisson", "HeteroscedasticGaussian"):  # whose exponentials are finite
        size = min(size, 30.0)
    return size * normal(n, c, seed=11)


def targets(name, n=40):
    return references.reference(references.LIKELIHOODS[name]).targets(n)


def log_likelihood(likelihood, f, y):
    normalizer = likelihood.n_targets(f.shape[1]) * likelihood.log_normalizer(SIGMA)
    return -likelihood.scale(SIGMA) * likelihood.loss(f, y) - normalizer


def test_every_likelihood_has_a_reference():
    of_criteria = {type(value) for value, _ in CRITERIA.values()}
    of_several = {type(value) for value in references.SEVERAL}
    assert set(references.REFERENCES) == of_criteria | of_several


@every_likelihood
@pytest.mark.parametrize("size", [0.1, 2.0, 30.0, 1e3])
def test_derivatives(name, size):
    contracts.check_derivatives(name, outputs(name, size=size), targets(name))


@every_likelihood
@pytest.mark.parametrize("size", [0.1, 2.0, 30.0, 1e3])
def test_log_likelihood(name, size):
    """Loss, scale and normaliser form the log-density, also for confident outputs."""
    likelihood, y = references.LIKELIHOODS[name], targets(name)
    f = outputs(name, size=size)
    expected = references.log_likelihood(likelihood, f, y, SIGMA)
    assert_equal(log_likelihood(likelihood, f, y), expected, 1e-13)


@every_likelihood
def test_targets_have_the_shape_that_loss_expects(name):
    likelihood, f, y = references.LIKELIHOODS[name], outputs(name), targets(name)
    expected = likelihood.loss(f, y)
    for given in (y, y.float(), y.reshape(len(y), -1)):
        made = likelihood.targets(given, f)
        assert_equal(likelihood.loss(f, made), expected, 1e-6)
        assert torch.equal(made, likelihood.targets(made, f))


@every_likelihood
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept_and_arguments_stay_as_they_are(name, dtype):
    likelihood, f = references.LIKELIHOODS[name], outputs(name).to(dtype)
    y = likelihood.targets(targets(name), f)
    before = f.clone(), y.clone()
    assert likelihood.loss(f, y).dtype == dtype
    assert likelihood.gradient(f, y).dtype == dtype
    assert likelihood.hessian_factor(f).dtype == dtype
    assert torch.equal(f, before[0])
    assert torch.equal(y, before[1])


@every_likelihood
def test_scale_and_normaliser_are_differentiable(name):
    likelihood = references.LIKELIHOODS[name]
    sigma = SIGMA.clone().requires_grad_()
    if likelihood.has_noise:
        assert torch.autograd.gradcheck(likelihood.scale, sigma)
        assert torch.autograd.gradcheck(likelihood.log_normalizer, sigma)
    else:
        assert likelihood.scale(sigma) == 1
        assert likelihood.log_normalizer(sigma) == 0


@every_likelihood
def test_numbers_of_outputs_and_targets(name):
    likelihood = references.LIKELIHOODS[name]
    per_target = 2 if name == "HeteroscedasticGaussian" else 1
    if name == "CategoricalMap":  # a label at each of two positions
        assert likelihood.n_targets(6) == 2
        assert [likelihood.n_outputs(n) for n in (3, 7)] == [6, 14]
        return
    n_targets = 1 if likelihood.noun == "class" else 6 // per_target
    assert likelihood.n_targets(6) == n_targets
    n_outputs = [likelihood.n_outputs(n) for n in (3, 7)]
    assert n_outputs == [3 * per_target, 7 * per_target]


def test_binary_outputs():
    assert [Bernoulli().n_outputs(n) for n in (1, 2)] == [1, 1]
    assert Categorical().n_outputs(2) == 2


def test_softmax_factor_of_confident_outputs_keeps_relative_precision():
    """Next to a probability of one, the other rows of ``S Sᵀ`` remain exact."""
    f = torch.tensor([[0.0, -40.0, -90.0], [-50.0, 0.0, -300.0]]).double()
    p = f.softmax(-1)
    S = Categorical().hessian_factor(f)
    assert S.shape == (2, 3, 2)
    found = (S @ S.mT).diagonal(dim1=1, dim2=2)
    expected = p * torch.stack([p.sum(1) - p[:, k] for k in range(3)], 1)
    others = torch.tensor([[False, True, True], [True, False, True]])
    exact = p[others]  # p (1 - p) = p where 1 - p rounds to one
    assert ((found[others] - exact).abs() <= 1e-12 * exact).all()
    assert (found - expected).abs().max() <= 1e-15


def test_bernoulli_class_logits_give_the_sigmoid():
    f, cov = normal(5, 1), normal(5, 1, 1) ** 2
    mean, wide = Bernoulli().class_logits(f, cov)
    p = torch.cat([1 - f.sigmoid(), f.sigmoid()], 1)
    assert_equal(mean.softmax(-1), p, 1e-14)
    difference = torch.tensor([-1.0, 1.0]).double()
    variance = torch.einsum("i,bij,j->b", difference, wide, difference)
    assert_equal(variance, cov.flatten(), 1e-14)
    assert_equal(Bernoulli().probabilities(f), p, 1e-14)


def test_labels_of_a_row_are_predicted_independently():
    likelihood = references.LIKELIHOODS["MultilabelBernoulli"]
    f, root = normal(5, 3), normal(5, 3, 3, seed=1)
    cov = root @ root.mT
    expected = likelihood.class_logits(f, cov.diagonal(dim1=1, dim2=2))
    for found, wanted in zip(likelihood.class_logits(f, cov), expected, strict=True):
        assert_equal(found, wanted, 1e-15)


def test_categorical_class_logits_are_the_outputs():
    f, cov = normal(5, 3), normal(5, 3, 3)
    mean, same = Categorical().class_logits(f, cov)
    assert mean is f
    assert same is cov
    assert_equal(Categorical().probabilities(f), f.softmax(-1), 1e-15)


def test_squared_errors_are_halved():
    f, y = outputs("Gaussian"), targets("Gaussian")
    loss = CRITERIA[nn.MSELoss][0].loss(f, y).sum()
    assert_equal(nn.MSELoss(reduction="sum")(f, y) / 2, loss, 1e-14)


# ---------------------------------------------------- options of the criterion
def weighted_criteria():
    w = torch.tensor([0.5, 2.0, 1.2], dtype=torch.float64)
    pos = torch.tensor([2.5], dtype=torch.float64)
    return [
        (nn.CrossEntropyLoss(), Categorical(), 3),
        (nn.BCEWithLogitsLoss(), Bernoulli(), 1),
        (nn.CrossEntropyLoss(weight=w), Categorical(), 3),
        (nn.CrossEntropyLoss(label_smoothing=0.3), Categorical(), 3),
        (nn.CrossEntropyLoss(weight=w, label_smoothing=0.3), Categorical(), 3),
        (nn.BCEWithLogitsLoss(pos_weight=pos), Bernoulli(), 1),
    ]


@pytest.mark.parametrize(("criterion", "plain", "c"), weighted_criteria())
def test_options_of_the_criterion(criterion, plain, c):
    """Loss, gradient and Hessian equal torch's results for each row."""
    likelihood = plain.configured(criterion)
    f, y = normal(20, c, seed=4), torch.arange(20) % max(2, c)
    y = y if c > 1 else y.double().unsqueeze(1)
    h = likelihood.loss_scale(y)
    h = torch.ones(20, dtype=torch.float64) if h is None else h
    criterion.reduction = "none"

    def loss(f):
        return criterion(f, y).reshape(-1)

    leaf = f.clone().requires_grad_()
    expected = loss(leaf)
    assert_equal(h * likelihood.loss(f, y), expected.detach(), 1e-12)
    (slope,) = torch.autograd.grad(expected.sum(), leaf)
    assert_equal(h.unsqueeze(1) * likelihood.gradient(f, y), slope, 1e-12)
    S = likelihood.hessian_factor(f)
    whole = torch.autograd.functional.hessian(lambda v: loss(v).sum(), f)
    rows = torch.stack([whole[n, :, n] for n in range(20)])
    assert_equal(h.reshape(-1, 1, 1) * (S @ S.mT), rows, 1e-12)


def test_plain_criteria_scale_nothing():
    y = torch.arange(3)
    assert Categorical().configured(nn.CrossEntropyLoss()) == Categorical()
    assert Categorical().loss_scale(y) is None
    assert Categorical(None, 0.1).loss_scale(y) is None
    assert Bernoulli().configured(nn.BCELoss()) == Bernoulli()
    assert Bernoulli().loss_scale(y.double().unsqueeze(1)) is None


# ------------------------------------------------------------------------- numbers
NUMBERS = {
    name: likelihood
    for name, likelihood in references.LIKELIHOODS.items()
    if not likelihood.is_classification
}
RELATIVE = 0.5, 3.0
NUMBERS["noise levels"] = Gaussian(RELATIVE)
every_number = pytest.mark.parametrize("name", NUMBERS)
NOISE, N_DRAWS = 0.6, 200_000
# outputs of three rows: confident, uncertain and very uncertain
MEAN = np.array([[0.3, -1.0], [1.5, 0.4], [-0.5, 1.2]])
VARIANCE = np.array([[1e-14, 1e-14], [0.2, 0.3], [0.8, 0.5]])


def drawn(name):
    """Return draws of outputs (n, c, s) and of targets (n, t, s)."""
    generator = np.random.default_rng(0)
    normal = generator.standard_normal((*MEAN.shape, N_DRAWS))
    f = MEAN[..., None] + np.sqrt(VARIANCE)[..., None] * normal
    return f, NUMBERS[name].sample(f, NOISE, generator)


@every_number
def test_moments_of_new_targets(name):
    _, y = drawn(name)
    mean, variance = NUMBERS[name].moments(MEAN, VARIANCE, NOISE)
    error = y.std(-1) / math.sqrt(N_DRAWS)
    assert (abs(y.mean(-1) - mean) < 5 * error).all()
    fourth = ((y - mean[..., None]) ** 2).std(-1) / math.sqrt(N_DRAWS)
    assert (abs(y.var(-1) - variance) < 5 * fourth).all()


@every_number
def test_joint_moments_of_new_targets(name):
    """The outputs of different rows are correlated."""
    generator = np.random.default_rng(0)
    root = generator.standard_normal((2, 3, 3)) / 3  # of each output, across rows
    cov = np.einsum("cij,ckj->ikc", root, root)
    normal = generator.standard_normal((2, 3, N_DRAWS))
    f = MEAN[..., None] + np.einsum("cij,cjs->ics", root, normal)
    y = NUMBERS[name].sample(f, NOISE, generator)
    mean, found = NUMBERS[name].joint_moments(MEAN, cov, NOISE)
    assert mean.shape == y.shape[:2]
    for t in range(y.shape[1]):
        products = (y[:, None, t] - mean[:, None, None, t]) * (
            y[None, :, t] - mean[None, :, None, t]
        )
        error = products.std(-1) / math.sqrt(N_DRAWS)
        assert (abs(products.mean(-1) - found[..., t]) < 5 * error).all()


@every_number
def test_quantiles_of_new_targets(name):
    _, y = drawn(name)
    levels = np.array([0.05, 0.5, 0.9])
    found = NUMBERS[name].quantiles(MEAN, VARIANCE, NOISE, levels)
    assert found.shape == (*y.shape[:2], 3)
    error = 5 * 0.5 / math.sqrt(N_DRAWS)
    for index, level in enumerate(levels):
        value = found[..., index, None]
        assert ((y <= value + 1e-9).mean(-1) > level - error).all()
        if name == "Poisson":
            assert ((y <= value - 1).mean(-1) < level + error).all()
            assert (value == np.round(value)).all()
        else:
            assert ((y <= value).mean(-1) < level + error).all()


@every_number
def test_log_density_of_new_targets(name):
    f, _ = drawn(name)
    likelihood = NUMBERS[name]
    sigma = torch.tensor(NOISE, dtype=torch.float64)
    y = torch.tensor([[0.0, 3.0], [7.0, 1.0], [2.0, 0.0]], dtype=torch.float64)
    y = y[:, : likelihood.n_targets(2)]
    if name == "noise levels":  # far from others nothing is drawn
        y = torch.from_numpy(MEAN) + torch.tensor([[0.2, -1.0]], dtype=torch.float64)
    mean, variance = map(torch.from_numpy, (MEAN, VARIANCE))
    found = likelihood.log_density(mean, variance, y, NOISE)
    for n in range(3):
        outputs = torch.from_numpy(f[n].T)
        levels = sigma * torch.tensor(getattr(likelihood, "relative", None) or 1.0)
        known = references.log_likelihood(
            likelihood, outputs, y[n].expand(N_DRAWS, -1), levels
        )
        p = known.exp()
        error = float(p.std() / p.mean()) / math.sqrt(N_DRAWS)
        assert abs(float(p.mean().log() - found[n])) < 5 * error + 1e-6


def test_what_counts_are():
    for y in ([[-1.0]], [[0.5]]):
        with pytest.raises(ValueError, match="not counts"):
            Poisson().check_targets(np.array(y))
    with pytest.raises(ValueError, match="criterion__log_input=False"):
        Poisson().configured(nn.PoissonNLLLoss(log_input=False))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_heteroscedastic_criterion_is_the_loss(reduction):
    f, y = normal(30, 6, seed=1), normal(30, 3, seed=2)
    found = HeteroscedasticNLLLoss(reduction)(f, y)
    each = HeteroscedasticGaussian().loss(f, y)
    expected = {"none": each, "sum": each.sum(), "mean": each.mean() / 3}[reduction]
    found = found.sum(1) if reduction == "none" else found
    assert_equal(found, expected, 1e-12)


def test_several_noise_levels():
    """Loss, normaliser and derivatives equal those of normal distributions."""
    likelihood = Gaussian(RELATIVE)
    f, y = normal(20, 2, seed=4), normal(20, 2, seed=5)
    leaf = f.clone().requires_grad_()
    levels = SIGMA * torch.tensor(RELATIVE, dtype=torch.float64)
    expected = torch.distributions.Normal(leaf, levels).log_prob(y).sum(1)
    assert_equal(log_likelihood(likelihood, f, y), expected.detach(), 1e-12)
    (slope,) = torch.autograd.grad(-expected.sum(), leaf)
    assert_equal(likelihood.scale(SIGMA) * likelihood.gradient(f, y), slope, 1e-12)
    S, u = likelihood.hessian_factor(f), normal(20, 2, seed=6)
    hessian = (levels**-2).diag().expand(20, -1, -1)
    assert_equal(likelihood.scale(SIGMA) * S @ S.mT, hessian, 1e-12)
    expected = torch.einsum("bcd,bd->bc", S @ S.mT, u)
    assert_equal(likelihood.hessian_operator(f)(u), expected, 1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("n_classes", [5, 30])
def test_the_memory_layout_changes_no_derivative(n_classes, smoothing):
    """Many classes by column keep their layout, since mixed layouts are slow."""
    likelihood = Categorical(label_smoothing=smoothing)
    f, u = normal(40, n_classes, seed=7), normal(40, n_classes, seed=8)
    y = torch.arange(40) % n_classes
    by_column = f.T.contiguous().T
    for other in (f, by_column):
        found = likelihood.hessian_operator(other)(u.T.contiguous().T)
        p = f.softmax(1)
        assert_equal(found, p * (u - (p * u).sum(1, keepdim=True)), 1e-14)
        assert_equal(likelihood.loss(other, y), likelihood.loss(f, y), 1e-14)
        leaf = f.clone().requires_grad_()
        (slope,) = torch.autograd.grad(likelihood.loss(leaf, y).sum(), leaf)
        assert_equal(likelihood.gradient(other, y), slope, 1e-14)
    if not smoothing:
        assert likelihood.gradient(by_column, y).stride(0) == 1

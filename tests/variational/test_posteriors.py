"""Tests of every posterior in the registry."""

import copy
import pickle

import numpy as np
import pytest
import torch
from densities import (
    BOUND,
    CASES,
    KINDS,
    LOCATION,
    N_WEIGHTS,
    SCALE,
    distribution,
    expectation,
    generator,
    posterior,
)
from scipy.stats import kstest

pytestmark = pytest.mark.usefixtures("rng_untouched")
every_name = pytest.mark.parametrize("name", KINDS)
every_setting = pytest.mark.parametrize(("name", "setting"), CASES)


def close(found, wanted, rtol, atol=0.0):
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=rtol, atol=atol)


# The density


@every_setting
def test_density_integrates_to_one(name, setting):
    mass = expectation(posterior(name, setting), torch.ones_like)
    # 1e-9 of Kumaraswamy's mass is beyond the grid; kinks err by the step squared
    close(mass, torch.ones_like(mass), rtol=3e-7)


@every_setting
def test_draws_follow_the_integrated_density(name, setting):
    found = posterior(name, setting)
    points, below = distribution(found)
    w = found.sample(4000, generator(1))[0].detach()
    for p in range(N_WEIGHTS):
        mass = np.interp(w[:, p], points[:, p], below[:, p])
        # 48 fixed tests: one p-value below 1e-4 has a chance of 0.5 %
        assert kstest(mass, "uniform").pvalue > 1e-4


@every_setting
def test_log_densities_of_draws_are_those_of_log_prob(name, setting):
    found = posterior(name, setting)
    w, log_q = found.sample(500, generator(2))
    assert w.shape == log_q.shape == (500, N_WEIGHTS)
    # w has lost digits of the noise: 1e-16 |w| / σ, times the slope of log q
    close(log_q, found.log_prob(w), rtol=1e-9, atol=1e-9)


# Moments


@every_setting
def test_moments(name, setting):
    found = posterior(name, setting)
    mean = expectation(found, lambda w: w)
    # kinks err by the step squared, 5e-8 of the variance
    close(found.mean(), mean, rtol=1e-6, atol=1e-6)
    close(found.variance(), expectation(found, lambda w: (w - mean) ** 2), rtol=1e-6)


@every_setting
def test_medians(name, setting):
    found = posterior(name, setting)
    points, below = distribution(found)
    for p, median in enumerate(found.median().tolist()):
        # linear between points, which have at most 5 % of the mass between them
        assert abs(np.interp(median, points[:, p], below[:, p]) - 0.5) < 1e-3


@every_setting
def test_closed_forms(name, setting):
    found = posterior(name, setting)
    closed_form = found.closed_form()
    assert (closed_form is not None) == (name in {"gaussian", "kumaraswamy"})
    if closed_form is None:
        return
    entropy, second_moment = closed_form

    def surprise(w):
        log_q = found.log_prob(w)
        # a point that rounds to a bound counts for nothing
        return -log_q.masked_fill(log_q.isinf(), 0)

    close(entropy, expectation(found, surprise), rtol=1e-6, atol=1e-6)
    close(second_moment, expectation(found, lambda w: w**2), rtol=1e-6)


@every_name
@pytest.mark.parametrize("is_narrow", [False, True])
def test_initial_medians_and_deviations(name, is_narrow):
    narrow = 1e-5 if name == "kumaraswamy" else 1e-20
    scale = (narrow if is_narrow else 1.0) * SCALE
    found = KINDS[name](LOCATION, scale, BOUND)
    # a location next to a bound leaves less than the given deviation
    close(found.median(), LOCATION, rtol=1e-9, atol=1e-12)
    close(found.variance().sqrt(), scale, rtol=0.01)
    # Kumaraswamy is skewed
    assert ((found.mean() - LOCATION).abs() < 0.2 * scale).all()


# Gradients


@every_setting
@pytest.mark.parametrize("n", [1, 3])
def test_draws_have_the_derivatives_of_finite_differences(name, setting, n):
    found = posterior(name, setting)
    parameters = tuple(found.parameters())
    assert torch.autograd.gradcheck(
        lambda *_: found.sample(n, generator(7)), parameters
    )


# Noise


@every_name
def test_same_seed_same_draws(name):
    found = posterior(name, 0)
    first, again, other = (found.sample(2, generator(s))[0] for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


@every_name
def test_without_a_generator_the_global_one_is_used(name):
    found = posterior(name, 0)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, second = found.sample()[0], found.sample()[0]
        torch.manual_seed(3)
        assert torch.equal(first, found.sample()[0])
        assert not torch.equal(first, second)


@every_name
@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_numbers_of_draws_are_checked(name, n):
    with pytest.raises(ValueError, match=r"n=.* is not an integer of at least 1"):
        posterior(name).sample(n)


@pytest.mark.gpu
@every_name
def test_a_generator_on_the_cpu_serves_a_gpu(name):
    found = posterior(name, 0)
    moved = posterior(name, 0).to("cuda")
    twins = moved.sample(3, generator())
    for twin, one in zip(twins, found.sample(3, generator()), strict=True):
        assert twin.device.type == "cuda"
        close(twin.cpu(), one, rtol=1e-10, atol=1e-10)
    twins[1].sum().backward()
    assert moved.log_prob(twins[0]).device.type == "cuda"


# Modules


@every_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_follows_the_location(name, dtype):
    found = posterior(name, dtype=dtype)
    assert {parameter.dtype for parameter in found.parameters()} == {dtype}
    results = [*found.sample(2, generator()), found.log_prob(found.median())]
    results += [found.median(), found.mean(), found.variance()]
    results += found.closed_form() or ()
    assert {x.dtype for x in results} == {dtype}
    assert {x.shape[-1] for x in results} == {N_WEIGHTS}
    mixed = KINDS[name](LOCATION.to(dtype), SCALE.float())
    assert {parameter.dtype for parameter in mixed.parameters()} == {dtype}


@every_name
def test_parameters_are_leaves_of_their_own(name):
    location, scale = LOCATION.clone().requires_grad_(), SCALE.clone()
    found = KINDS[name](location, scale, BOUND)
    with torch.no_grad():
        for parameter in found.parameters():
            assert parameter.is_leaf
            parameter.add_(1)
    assert torch.equal(location, LOCATION)
    assert torch.equal(scale, SCALE)
    assert found.n_weights == N_WEIGHTS


@every_name
def test_state_pickle_and_copy_keep_the_distribution(name):
    found = posterior(name, 0)
    wanted = found.sample(2, generator())[1]
    restored = posterior(name)
    restored.load_state_dict(found.state_dict())
    assert set(found.state_dict()) == {key for key, _ in found.named_parameters()}
    for twin in (restored, pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert torch.equal(twin.sample(2, generator())[1], wanted)


# What is refused


SIZES, VALUES = "location has shape", "location or scale has a value"


@pytest.mark.parametrize(
    ("location", "scale", "message"),
    [
        ([0.0, 1.0], [0.1], SIZES),
        ([[0.0]], [[0.1]], SIZES),
        ([], [], SIZES),
        ([0.0, float("nan")], [0.1, 0.1], VALUES),
        ([0.0], [float("inf")], VALUES),
        ([0.0, 0.0], [0.1, 0.0], VALUES),
    ],
)
def test_bad_starts(location, scale, message):
    with pytest.raises(ValueError, match=message):
        KINDS["gaussian"](torch.tensor(location), torch.tensor(scale))


@every_name
def test_bad_bounds(name):
    with pytest.raises(ValueError, match=r"bound=0 is not"):
        KINDS[name](LOCATION, SCALE, 0)

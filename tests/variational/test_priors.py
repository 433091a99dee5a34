"""Priors over weights."""

import math
import re

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import norm

from sklaplace.variational import (
    GaussianPrior,
    ScaleMixturePrior,
    UniformPrior,
)

W = np.array([0.0, 1e-8, -0.003, 0.1, -2.5, 2.999, 40.0])


@pytest.mark.parametrize("scale", [0.01, 1.0, 7.0])
def test_gaussian(scale):
    found = GaussianPrior(scale).log_prob(torch.tensor(W))
    np.testing.assert_allclose(found, norm.logpdf(W, scale=scale), rtol=1e-14)


@pytest.mark.parametrize("weight", [0.25, 0.75, 1e-9, 1 - 1e-9])
@pytest.mark.parametrize("narrow", [math.exp(-8), 0.5])
def test_scale_mixture(weight, narrow):
    prior = ScaleMixturePrior(2.0, weight, narrow)
    parts = np.stack([norm.logpdf(W, scale=2.0), norm.logpdf(W, scale=narrow)], -1)
    wanted = logsumexp(parts, b=[weight, 1 - weight], axis=-1)
    # the share 1 − 1e-9 has lost seven digits of 1e-9
    np.testing.assert_allclose(prior.log_prob(torch.tensor(W)), wanted, rtol=1e-7)


def test_scale_mixture_far_out_in_single_precision():
    w = torch.tensor([0.0, 1e-3, 1.0, 1e10], requires_grad=True)
    found = ScaleMixturePrior().log_prob(w)
    found.sum().backward()
    assert found.isfinite().all()
    assert w.grad.isfinite().all()
    # out there the wide part is alone
    np.testing.assert_allclose(w.grad[2:], [-1.0, -1e10], rtol=1e-6)


def test_uniform():
    found = UniformPrior(2.5).log_prob(torch.tensor([0.0, -2.5, 2.5, 2.51, -3.0]))
    density = -math.log(5)
    np.testing.assert_allclose(found, [density] * 3 + [-math.inf] * 2, rtol=1e-6)


@pytest.mark.parametrize("prior", [GaussianPrior(0.7), UniformPrior(3.0)])
def test_expected_log_prob(prior):
    """Expectations over two-point distributions are sums."""
    w = torch.tensor([[0.3, -1.2, 2.0], [1.0, 0.4, -2.5]], dtype=torch.float64)
    found = prior.expected_log_prob(w.square().mean(0))
    torch.testing.assert_close(found, prior.log_prob(w).mean(0), rtol=1e-14, atol=0)


def test_the_expectation_of_a_mixture_is_no_function_of_second_moments():
    assert ScaleMixturePrior().expected_log_prob(torch.ones(3)) is None


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (GaussianPrior, {"scale": 0}, "prior_scale=0 is not positive and finite"),
        (GaussianPrior, {"scale": "1"}, "prior_scale='1' is not positive and finite"),
        (ScaleMixturePrior, {"scale": -1.0}, "prior_scale=-1.0 is not positive"),
        (ScaleMixturePrior, {"weight": 1}, "prior_params['weight']=1 is not between"),
        (ScaleMixturePrior, {"weight": 0.0}, "prior_params['weight']=0.0 is not"),
        (ScaleMixturePrior, {"narrow": 0}, "prior_params['narrow']=0 is not positive"),
        (UniformPrior, {"bound": math.inf}, "bound=inf is not positive and finite"),
        (UniformPrior, {"bound": None}, "bound=None is not positive and finite"),
    ],
)
def test_bad_values(kind, values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**values)

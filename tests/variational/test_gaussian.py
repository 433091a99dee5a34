"""The Gaussian posterior."""

import numpy as np
import torch
from densities import generator, posterior
from scipy.stats import norm


def test_density_is_that_of_scipy():
    found = posterior("gaussian", 0)
    w = found.sample(20, generator())[0].detach()
    mean, sd = found.mean().detach().numpy(), found.variance().sqrt().detach().numpy()
    np.testing.assert_allclose(found.log_prob(w).detach(), norm.logpdf(w, mean, sd))
    entropy = found.closed_form()[0].detach()
    np.testing.assert_allclose(entropy, norm.entropy(mean, sd))


def test_gradients_are_those_of_blundell():
    """For ``f = w²/2 + log q``, df/dμ = w and df/dσ = w ε − 1/σ, times the sigmoid."""
    found = posterior("gaussian", 0)
    w, log_q = found.sample(1, generator())
    (w.square() / 2 + log_q).sum().backward()
    noise = ((w[0] - found.location) / found.scale).detach()
    chain = torch.sigmoid(found.raw_scale.detach())
    by_scale = (w[0] * noise - 1 / found.scale).detach() * chain
    torch.testing.assert_close(found.location.grad, w[0].detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.raw_scale.grad, by_scale, rtol=1e-12, atol=1e-14)

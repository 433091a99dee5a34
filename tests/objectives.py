"""A reference objective of Bayes by Backprop, and a record of every step."""

from typing import ClassVar

import numpy as np
import torch
from nets import MLP
from skorch.callbacks import Callback
from torch.distributions import Normal
from torch.func import functional_call
from torch.nn import functional

DOUBLE = {"module__dtype": torch.float64}
# Both sides add up a hundred numbers of size one in float64.
EXACT = {"rtol": 1e-12, "atol": 1e-12}
# Where one side takes logarithms of probabilities that are rounded.
ROUNDED = {"rtol": 1e-9, "atol": 1e-9}

X = np.random.default_rng(0).normal(size=(20, 2))
LABELS = np.arange(20) % 3
NUMBERS = np.random.default_rng(2).normal(size=20)


class Steps(Callback):
    """Record of each step: parameters, draw, gradients, rows and loss."""

    seen: ClassVar[list] = []

    def on_train_begin(self, net, **kwargs):
        Steps.seen.clear()

    def on_grad_computed(self, net, named_parameters, batch=None, **kwargs):
        X, y = batch
        posterior, (w, _) = net.module_.posterior, net.module_.drawn
        Steps.seen.append(
            {
                "location": posterior.location.detach().clone(),
                "raw_scale": posterior.raw_scale.detach().clone(),
                "w": w[0].detach().clone(),
                "gradient": [p.grad.clone() for p in posterior.parameters()],
                "X": X.clone(),
                "y": y,
            }
        )

    def on_batch_end(self, net, training=False, **kwargs):
        if training:
            Steps.seen[-1]["loss"] = net.history[-1, "batches", -1, "train_loss"]


def network(module, vector):
    """Return the module as a function of rows, for one vector of weights."""
    named = dict(module.named_parameters())
    parts = vector.split([p.numel() for p in named.values()])
    pairs = zip(named.items(), parts, strict=True)
    values = {name: part.reshape(p.shape) for (name, p), part in pairs}
    return lambda X: functional_call(module, values, (X,))


def reference(step, module, nll, kl_factor, *, prior_scale=1.0):
    """Return objective, gradients and parts for a Gaussian posterior and prior."""
    location = step["location"].requires_grad_()
    raw_scale = step["raw_scale"].requires_grad_()
    scale = functional.softplus(raw_scale)
    noise = ((step["w"] - location) / scale).detach()
    rows = nll(network(module, location + scale * noise)(step["X"]))
    q, p = Normal(location, scale), Normal(0.0, prior_scale)
    kl = torch.distributions.kl_divergence(q, p).sum()
    loss = rows + kl_factor * kl
    gradient = torch.autograd.grad(loss, [location, raw_scale])
    return loss.item(), gradient, rows.item(), kl.item()


def agrees(step, module, nll, kl_factor, tolerance=EXACT, **options):
    loss, gradient, *_ = reference(step, module, nll, kl_factor, **options)
    np.testing.assert_allclose(step["loss"], loss, **tolerance)
    for found, expected in zip(step["gradient"], gradient, strict=True):
        np.testing.assert_allclose(found, expected, **tolerance)


def double(kind=MLP, **params):
    return kind(dtype=torch.float64, **params)


def entropy(y=LABELS, **options):
    target, options = torch.tensor(y), {"reduction": "none"} | options
    return lambda f: functional.cross_entropy(f, target, **options).mean()


def normal(y, sigma):
    y = torch.tensor(y.reshape(20, -1))
    return lambda f: -Normal(f.reshape(y.shape), sigma).log_prob(y).sum(1).mean()

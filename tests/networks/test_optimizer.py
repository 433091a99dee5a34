"""CosineAdam: Adam with a cosine schedule, all steps on one batch."""

import math

import torch
from torch import nn

from sklaplace.networks.optimizer import CosineAdam


def problem():
    """Return parameters, and a closure for the gradients of a quadratic form."""
    w = nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    b = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
    calls = []

    def closure():
        w.grad = b.grad = None
        loss = (w**2).sum() + (b * w).sum() + 2 * ((b - 1) ** 2).sum()
        loss.backward()
        calls.append(float(loss.detach()))
        return loss

    return [w, b], closure, calls


def groups(parameters):
    w, b = parameters
    return [{"params": [w]}, {"params": [b], "lr": 0.2}]


def test_steps_are_those_of_adam_under_a_cosine():
    parameters, closure, _ = problem()
    optimizer = CosineAdam(groups(parameters), lr=0.05, n_steps=30, betas=(0.8, 0.9))
    optimizer.step(closure)
    expected, closure, _ = problem()
    plain = torch.optim.Adam(groups(expected), lr=0.05, betas=(0.8, 0.9))
    for step in range(30):
        share = (1 + math.cos(math.pi * step / 30)) / 2
        for group, lr in zip(plain.param_groups, (0.05, 0.2), strict=True):
            group["lr"] = share * lr
        closure()
        plain.step()
    for found, wanted in zip(parameters, expected, strict=True):
        assert torch.equal(found, wanted)


def test_first_loss_is_returned_without_a_graph():
    parameters, closure, calls = problem()
    loss = CosineAdam(parameters, n_steps=7).step(closure)
    assert not loss.requires_grad
    assert len(calls) == 7
    assert float(loss) == calls[0] != calls[-1]


def test_step_sizes_are_as_before():
    parameters, closure, _ = problem()
    optimizer = CosineAdam(groups(parameters), lr=0.05, n_steps=5)
    for _ in range(2):
        optimizer.step(closure)
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.2]

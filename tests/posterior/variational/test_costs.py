"""What draws cost, counted: what is kept for the backward pass, and the peak."""

import pytest
import torch
from costs import counted
from densities import generator
from torch.autograd.graph import saved_tensors_hooks

from sklaplace.posterior.variational import POSTERIORS, GaussianPrior
from sklaplace.posterior.variational.divergence import divergence

# numbers per weight that one draw from a Gaussian keeps, and that a step has at once,
# parameters and gradients aside
KEPT, PEAK = 2, 10


def fresh(name, n_weights):
    start = torch.zeros(n_weights)
    return POSTERIORS[name](start, start + 0.05)


def kept(name, n_weights, n=1):
    """Bytes that draws keep for the backward pass, each storage once."""
    found = fresh(name, n_weights)
    own = {parameter.untyped_storage()._cdata for parameter in found.parameters()}
    own |= {buffer.untyped_storage()._cdata for buffer in found.buffers()}
    seen = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = found.sample(n, generator())
        assert outputs[0].requires_grad
        return sum(seen.values())


def peak(name, n_weights):
    """Bytes alive at the peak of a draw, its divergence and the gradients."""
    found = fresh(name, n_weights)
    source, prior = generator(), GaussianPrior()
    with counted() as costs:
        w, log_q = found.sample(1, source)
        (w.sum() + divergence(found, prior, w, log_q)).backward()
    return costs.peak


@pytest.mark.parametrize("name", POSTERIORS)
def test_memory_is_linear_in_the_weights(name):
    few, many = (kept(name, n) for n in (10_000, 40_000))
    # next to slopes and centres, which weights share
    assert many == pytest.approx(4 * few, rel=1e-3)
    assert name != "gaussian" or many <= 4 * 40_000 * KEPT * 1.001
    few, many = (peak(name, n) for n in (10_000, 40_000))
    assert many == pytest.approx(4 * few, rel=1e-2)
    assert name != "gaussian" or many <= 4 * 40_000 * PEAK * 1.01


@pytest.mark.parametrize("name", POSTERIORS)
def test_draws_share_what_does_not_depend_on_them(name):
    """Ten draws keep less than ten times as much as one."""
    assert kept(name, 1000, 10) < 10 * kept(name, 1000)

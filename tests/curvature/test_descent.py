"""Gradient descent from trained weights, compared with a plain SGD loop in torch."""

import copy

import numpy as np
import pytest
import torch
from conftest import global_rng_states
from nets import MLP, BatchNormMLP, blobs, classifier, regressor, seeded, waves
from torch import nn

from sklaplace.core.random import counter_uniforms, row_hash
from sklaplace.curvature.descent import (
    Descent,
    Schedule,
    WeightMoments,
    weight_decays,
)
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.data.dataset import RowDataset

pytestmark = pytest.mark.usefixtures("rng_untouched")
X, Y = blobs()
X_REG, Y_REG = waves()
Y_REG = Y_REG.reshape(-1, 1).astype(np.float32)
SCHEDULE = Schedule(n_snapshots=4, steps_per_snapshot=3, lr=0.05)


def layout_of(module):
    named = module.named_parameters()
    return Layout(tuple(BlockSpec(name, tuple(p.shape)) for name, p in named))


def collected(net, dataset, decays=None, seed=5, layout=None):
    descent = Descent(net, dataset, decays or {}, seed)
    layout = layout_of(net.module_) if layout is None else layout
    return torch.stack(list(descent.iterates(layout, SCHEDULE)))


def rows_of_step(X, n_mean, step, seed=5):
    fraction = min(0.1, n_mean / len(X))
    uniforms = counter_uniforms(row_hash(torch.from_numpy(X)), 1, seed + step)
    return (uniforms[:, 0] < fraction).nonzero()[:, 0]


def plain_loop(module, X, loss, n_mean=128, schedule=SCHEDULE, weight_decay=0.0):
    """Return weights at each snapshot, by `torch.optim.SGD` in evaluation mode."""
    module = copy.deepcopy(module).eval()
    optimizer = torch.optim.SGD(
        module.parameters(), lr=schedule.lr, weight_decay=weight_decay
    )
    found = []
    for step in range(schedule.n_snapshots * schedule.steps_per_snapshot):
        rows = rows_of_step(X, n_mean, step)
        if len(rows):
            optimizer.zero_grad()
            loss(module(torch.from_numpy(X)[rows]), rows).backward()
            optimizer.step()
        if step % schedule.steps_per_snapshot == schedule.steps_per_snapshot - 1:
            found.append(nn.utils.parameters_to_vector(module.parameters()).detach())
    return torch.stack(found).double()


def cross_entropy(f, rows):
    return nn.functional.cross_entropy(f, torch.from_numpy(Y)[rows])


def assert_plain(found, net, X=X, loss=cross_entropy, **options):
    """Check iterates against the plain loop."""
    expected = plain_loop(net.module_, X, loss, **options)
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    # single precision, a dozen steps
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("module", [MLP, BatchNormMLP])
def test_iterates_are_those_of_plain_descent(module):
    net = seeded(classifier(module), X, Y)
    assert_plain(collected(net, net.get_dataset(X, Y)), net)


def test_statistics_of_normalisation_stay():
    net = seeded(classifier(BatchNormMLP), X, Y)
    net.module_.train()
    before = {k: v.clone() for k, v in net.module_.state_dict().items()}
    grads = [p.grad.clone() for p in net.module_.parameters()]
    state = global_rng_states()
    collected(net, net.get_dataset(X, Y))
    assert net.module_.training
    for parameter, grad in zip(net.module_.parameters(), grads, strict=True):
        assert parameter.requires_grad
        assert torch.equal(parameter.grad, grad)
    for name, value in net.module_.state_dict().items():
        assert torch.equal(value, before[name])
    assert global_rng_states() == state


def test_batches_are_those_of_the_net_up_to_a_tenth():
    for batch_size, n_mean in ((2, 2), (-1, len(X))):
        net = seeded(classifier(batch_size=batch_size), X, Y)
        assert_plain(collected(net, net.get_dataset(X, Y)), net, n_mean=n_mean)


def test_weight_decay_of_the_optimizer():
    settings = {"optimizer": torch.optim.Adam, "optimizer__weight_decay": 0.3}
    net = seeded(classifier(**settings), X, Y)
    decays = weight_decays(net)
    assert decays == dict.fromkeys(dict(net.module_.named_parameters()), 0.3)
    found = collected(net, net.get_dataset(X, Y), decays)
    assert_plain(found, net, weight_decay=0.3)
    groups = [("head.*", {"weight_decay": 0.1})]
    of_head = classifier(optimizer__param_groups=groups)
    decays = weight_decays(seeded(of_head, X, Y))
    assert decays["head.weight"] == decays["head.bias"] == 0.1
    assert decays["hidden.weight"] == 0


def test_sample_weights_are_those_of_a_weighted_mean():
    weights = np.linspace(0.5, 2, len(X))

    def loss(f, rows):
        w = torch.from_numpy(weights)[rows].float()
        targets = torch.from_numpy(Y)[rows]
        losses = nn.functional.cross_entropy(f, targets, reduction="none")
        return w @ losses / w.sum()

    net = seeded(classifier(), X, Y)
    dataset = RowDataset(net.get_dataset(X, Y), Y, weights)
    assert_plain(collected(net, dataset), net, loss=loss)


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_targets_have_the_shape_of_the_outputs(shape):
    """A criterion would broadcast (b,) against (b, 1)."""
    net = seeded(regressor(), X_REG, Y_REG)

    def loss(f, rows):
        return nn.functional.mse_loss(f, torch.from_numpy(Y_REG)[rows])

    dataset = net.get_dataset(X_REG, Y_REG.reshape(shape))
    assert_plain(collected(net, dataset), net, X_REG, loss)


def test_selected_weights_alone_move():
    net = seeded(classifier(), X, Y)
    whole = layout_of(net.module_)
    head = Layout(tuple(b for b in whole.blocks if b.name.startswith("head")))
    found = collected(net, net.get_dataset(X, Y), layout=head)
    module = copy.deepcopy(net.module_)
    module.hidden.requires_grad_(False)
    expected = plain_loop(module, X, cross_entropy)[:, -head.n_parameters :]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("far", [0.0, 1e6])
def test_moments_are_those_of_the_vectors(far):
    rng = torch.Generator().manual_seed(0)
    start = far + torch.randn(5, generator=rng, dtype=torch.float64)
    steps = torch.randn(7, 5, generator=rng, dtype=torch.float64)
    vectors = start + steps
    moments = WeightMoments(start, 3)
    for vector in vectors:
        moments.update(vector)
    moved = vectors - start
    atol = 1e-12 * max(1, far)
    torch.testing.assert_close(moments.mean, vectors.mean(0), rtol=0, atol=atol)
    # two passes over the differences, the rounding of the vectors taken as it is
    expected = moved.var(0, correction=0)
    torch.testing.assert_close(moments.variance, expected, rtol=1e-12, atol=0)
    means = torch.stack([moved[: n + 1].mean(0) for n in range(7)])
    found = torch.stack(list(moments.deviations))
    torch.testing.assert_close(found, (moved - means)[-3:], rtol=0, atol=1e-12)


def test_order_of_samples_does_not_matter():
    net = seeded(classifier(), X, Y)
    order = np.random.default_rng(0).permutation(len(X))
    expected = collected(net, net.get_dataset(X, Y))
    found = collected(net, net.get_dataset(X[order], Y[order]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    other = collected(net, net.get_dataset(X, Y), seed=6)
    assert (other - expected).abs().max() > 1e-3

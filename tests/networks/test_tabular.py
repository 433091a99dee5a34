"""Dropout in the module of the default networks."""

import numpy as np
import torch
from shared import seeded

from sklaplace.networks.tabular import (
    DROPOUT_RATE,
    DropoutNetwork,
    JointDropout,
    TabularNetwork,
)


class TestJointDropout:
    def test_leaves_the_same_units_of_all_rows_out(self):
        x = torch.arange(1.0, 61).reshape(3, 20)
        found = seeded(lambda: JointDropout(0.5)(x))
        kept = found[0] != 0
        assert 0 < kept.sum() < 20
        torch.testing.assert_close(found, x * kept / 0.5)

    def test_does_nothing_in_evaluation(self):
        x = torch.randn(3, 20)
        assert torch.equal(JointDropout(0.5).eval()(x), x)

    def test_repeated_and_shuffled_rows_have_the_same_gradients(self):
        X = np.random.RandomState(0).randn(12, 3)
        module = DropoutNetwork(np.zeros(3), np.ones(3), 2)
        rows = np.random.RandomState(0).permutation(np.repeat(np.arange(12), 3))

        def gradients(X):
            module.zero_grad()
            seeded(lambda: (module(torch.from_numpy(X)) ** 2).mean().backward())
            return [p.grad.clone() for p in module.parameters()]

        for found, expected in zip(gradients(X[rows]), gradients(X), strict=True):
            torch.testing.assert_close(found, expected)


class TestDropoutNetwork:
    def test_is_the_plain_network_in_evaluation(self):
        arguments = np.zeros(3), np.ones(3), 2
        plain = seeded(lambda: TabularNetwork(*arguments))
        dropout = seeded(lambda: DropoutNetwork(*arguments).eval())
        X = torch.randn(5, 3, dtype=torch.float64)
        assert torch.equal(dropout(X), plain(X))

    def test_inputs_of_the_linear_part_are_never_left_out(self):
        module = DropoutNetwork(np.zeros(3), np.ones(3), 2).train()
        X = torch.randn(5, 3, dtype=torch.float64)
        n_hidden = module.hidden.out_features
        found = seeded(lambda: module.features(X))
        plain = module.eval().features(X)
        assert torch.equal(found[:, n_hidden:], plain[:, n_hidden:])
        share = float((found[0, :n_hidden] == 0).double().mean())
        spread = (DROPOUT_RATE * (1 - DROPOUT_RATE) / n_hidden) ** 0.5
        assert abs(share - DROPOUT_RATE) < 5 * spread

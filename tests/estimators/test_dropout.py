"""Dropout in prediction: masks depend only on the draw; exact sums."""

import numpy as np
import pytest
import torch
from nets import (
    MLP,
    BatchNormMLP,
    RecordTraining,
    blobs,
    classifier,
    regressor,
    seeded,
    waves,
)
from refusals import refused_fit
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from torch import nn

from sklaplace import MCDropoutClassifier, MCDropoutRegressor
from sklaplace.core.random import private_rng
from sklaplace.estimators.dropout import DROPOUTS, drawn_mask, mc_dropout_outputs
from sklaplace.networks.forward import Forward
from sklaplace.networks.tabular import JointDropout

X, Y = blobs()
N = 20_000
# layers that drop whole channels
CHANNELS = [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def ones(kind, b, channels):
    """Return a batch with the number of axes that the layer accepts."""
    n_axes = {nn.Dropout2d: 2, nn.Dropout3d: 3}.get(kind, 1)
    return torch.ones(b, channels, *[3] * n_axes)


def masked(layer, x, seed=0):
    """Return outputs of a layer in evaluation mode, with one choice of units."""
    with drawn_mask(layer, generator(seed)):
        return layer(x)


def drawn(layer, x, seeds):
    """Return outputs (s, ...), with one choice of units per seed."""
    return torch.stack([masked(layer, x, seed) for seed in seeds])


class TwoUnits(nn.Module):
    """A network with two hidden units, so that all masks can be listed."""

    def __init__(self, p=0.3, dropout=nn.Dropout):
        super().__init__()
        self.hidden = nn.Linear(2, 2, dtype=torch.float64)
        self.dropout = dropout(p)
        self.head = nn.Linear(2, 3, dtype=torch.float64)

    def forward(self, X):
        return self.head(self.dropout(torch.tanh(self.hidden(X))))


class Uncalled(MLP):
    """A layer that is never called."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dropout = nn.Dropout(0.5)


class Sequences(nn.Module):
    """A body on sequences (b, 6, 4), one small Dropout, and a linear head."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        self.small, self.norm, self.head = (
            nn.Dropout(0.01),
            nn.BatchNorm1d(8),
            nn.Linear(8, 2),
        )

    def forward(self, X):
        return self.head(self.norm(self.small(self.body(X))))


class Functional(Sequences):
    def body(self, X):
        hidden = self.first(X).mean(1).tanh()
        hidden = nn.functional.dropout(hidden, 0.5, self.training)
        return self.second(hidden)


class Channels(Sequences):
    def body(self, X):
        hidden = self.first(X).transpose(1, 2).tanh()
        return nn.functional.dropout1d(hidden, 0.5, self.training).mean(-1)


class Recurrent(Sequences):
    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.cell = kind(4, 8, 2, dropout=0.5, batch_first=True, **options)

    def body(self, X):
        return self.cell(X)[0][:, -1]


class Gated(Recurrent):
    """Packed sequences of the lengths that the inputs tell."""

    def __init__(self):
        super().__init__(nn.GRU)

    def body(self, X):
        lengths = 3 + (X[:, 0, 0] > 0).long() + (X[:, 0, 1] > 0).long()
        packed = nn.utils.rnn.pack_padded_sequence(
            X, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.cell(packed)[1][-1]


class Attending(Sequences):
    def __init__(self, need_weights=True):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.options = {"need_weights": need_weights}

    def body(self, X):
        h = self.first(X)
        return self.attention(h, h, h, **self.options)[0].mean(1)


class AttendingFast(Attending):
    def __init__(self):
        super().__init__(need_weights=False)


class Encoding(Sequences):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def body(self, X):
        return self.encoder(self.first(X)).mean(1)


class ByHand(Sequences):
    """Masks that no function of torch knows to be dropout."""

    def body(self, X):
        hidden = self.first(X).mean(1)
        kept = torch.rand_like(hidden) > 0.5 if self.training else 1.0
        return hidden * kept


class TimeFirst(Sequences):
    """Masks of tensors with the samples in another axis."""

    def body(self, X):
        hidden = self.first(X.transpose(0, 1))
        return nn.functional.dropout(hidden, 0.5, self.training).mean(0)


class OwnDropout(nn.Dropout):
    """A subclass of Dropout."""


# ------------------------------------------------------------------------- masks
class TestMasks:
    @pytest.mark.parametrize("kind", CHANNELS)
    def test_of_channels_are_the_same_at_all_positions(self, kind):
        found = masked(kind(0.5).eval(), ones(kind, 2, 50)).flatten(2)
        assert (found == found[..., :1]).all()
        assert len(found.unique()) == 2

    @pytest.mark.parametrize("kind", [nn.Dropout, nn.AlphaDropout])
    def test_of_units_differ_between_positions(self, kind):
        found = masked(kind(0.5).eval(), torch.ones(2, 5, 30))
        assert not (found == found[..., :1]).all()

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_share_and_scale_of_units(self, p):
        found = masked(nn.Dropout(p).eval(), torch.full((1, N), 2.0))
        share = float((found == 0).double().mean())
        # five standard errors
        assert share == pytest.approx(p, abs=5 * (p * (1 - p) / N) ** 0.5)
        torch.testing.assert_close(found.max(), torch.tensor(2 / (1 - p)))

    @pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.FeatureAlphaDropout])
    @pytest.mark.parametrize("p", [0.2, 0.7])
    def test_alpha_dropout_takes_the_values_of_torch(self, kind, p):
        x = torch.full((1, 200), 0.3, dtype=torch.float64)
        layer = kind(p)
        with private_rng(0):
            expected = layer.train()(x).unique()
        found = masked(layer.eval(), x).unique()
        # torch knows SELU's lowest value to seven digits
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("kind", DROPOUTS)
    def test_all_units_may_be_left_out(self, kind):
        assert not masked(kind(1.0).eval(), ones(kind, 2, 3)).any()

    @pytest.mark.parametrize("kind", [nn.Dropout, nn.AlphaDropout])
    def test_in_place_layers_leave_their_inputs_alone(self, kind):
        x = torch.ones(2, 30)
        found = masked(kind(0.5, inplace=True).eval(), x)
        assert (x == 1).all()
        assert not (found == 1).all()

    def test_subclasses_are_drawn(self):
        x = torch.ones(2, 30)
        expected = drawn(nn.Dropout(0.5).eval(), x, [0])
        for kind in (OwnDropout, JointDropout):
            assert torch.equal(drawn(kind(0.5).eval(), x, [0]), expected)

    def test_a_layer_used_twice_is_drawn_twice(self):
        layer, x = nn.Dropout(0.5).eval(), torch.ones(2, 30)
        with drawn_mask(layer, generator()):
            assert not torch.equal(layer(x), layer(x))

    def test_hooks_are_removed(self):
        network = TwoUnits().eval()
        with drawn_mask(network, generator()):
            assert network.dropout._forward_hooks
        assert not network.dropout._forward_hooks
        with pytest.raises(KeyError), drawn_mask(network, generator()):
            raise KeyError
        assert not network.dropout._forward_hooks


# -------------------------------------------------------------------- enumeration
def enumerated(network, x, p):
    """Return outputs (b, c, masks) for all masks of two units, and probabilities."""
    hidden = torch.tanh(network.hidden(x))
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0]).double()] * 2)
    outputs = [network.head(hidden * mask / (1 - p)) for mask in masks]
    kept = masks.sum(1)
    return torch.stack(outputs, -1).detach(), p ** (2 - kept) * (1 - p) ** kept


def test_outputs_are_those_of_all_masks_in_their_shares():
    p, x = 0.3, torch.linspace(-1, 1, 10).reshape(5, 2).double()
    with private_rng(0):
        network = TwoUnits(p).eval()
    outputs, shares = enumerated(network, x, p)
    found = mc_dropout_outputs(Forward(network, network), x, list(range(4000)))
    which = (found[..., None] - outputs[..., None, :]).abs().amax((0, 1)).argmin(-1)
    torch.testing.assert_close(found, outputs[..., which])
    counts = torch.bincount(which, minlength=4) / 4000
    # five standard errors
    assert ((counts - shares).abs() < 5 * (shares / 4000).sqrt()).all()


def test_predictions_are_averages_over_masks():
    p, rows = 0.2, X.astype(np.float64)
    net = seeded(classifier(TwoUnits, module__p=p, max_epochs=30), rows, Y)
    model = MCDropoutClassifier(FrozenEstimator(net), n_samples=3000, random_state=0)
    model.fit(rows, Y)
    outputs, shares = enumerated(net.module_, torch.tensor(rows), p)
    expected = outputs.softmax(1) @ shares
    # five standard errors of 3,000 draws of numbers in [0, 1]
    errors = 5 / 3000**0.5
    np.testing.assert_allclose(model.predict_proba(rows), expected, atol=errors * 0.5)
    mean = outputs @ shares
    variance = (outputs - mean.unsqueeze(-1)) ** 2 @ shares
    found, largest = model.latent_mean_and_variance(rows), float(variance.max())
    np.testing.assert_allclose(found[0], mean, atol=errors * largest**0.5)
    np.testing.assert_allclose(found[1], variance, atol=2 * errors * largest)


# --------------------------------------------------------------------- estimators
class TestEstimators:
    def test_a_draw_is_a_mask_for_all_rows(self):
        rows = X.astype(np.float64)
        net = seeded(classifier(TwoUnits, module__p=0.5), rows, Y)
        model = MCDropoutClassifier(FrozenEstimator(net), random_state=0).fit(rows, Y)
        outputs, _ = enumerated(net.module_, torch.tensor(rows), 0.5)
        own = outputs.softmax(1)
        for draw in np.moveaxis(model.sample_proba(rows, 10), -1, 0):
            gaps = [np.abs(draw - own[..., k].numpy()).max() for k in range(4)]
            assert min(gaps) < 1e-9

    def test_many_rows_need_no_more_memory_than_their_batches(self, little_memory):
        model = MCDropoutClassifier(classifier(BatchNormMLP), n_samples=4).fit(X, Y)
        expected = model.predict_proba(X)
        little_memory(5_000)
        np.testing.assert_array_equal(model.predict_proba(X), expected)
        model.predict_uncertainty(X)
        model.latent_mean_and_variance(X)
        with pytest.raises(ValueError, match="n_samples=4 draws of 180 outputs"):
            model.sample_proba(X, 4)

    @pytest.mark.parametrize("kind", [MCDropoutClassifier, MCDropoutRegressor])
    @pytest.mark.parametrize("module", [MLP, Uncalled])
    @pytest.mark.parametrize("frozen", [False, True])
    def test_networks_without_dropout_are_refused(self, kind, module, frozen):
        is_classifier = kind is MCDropoutClassifier
        data = (X, Y) if is_classifier else waves(n_targets=1)
        make = classifier if is_classifier else regressor
        net = make(module, callbacks=[RecordTraining()])
        if frozen:
            net = FrozenEstimator(seeded(clone(net), *data))
        refused_fit(kind(net), "no dropout layer", "Use one of", data=data)


# -------------------------------------------------------------- functions and layers
ROWS = np.random.default_rng(0).normal(size=(90, 6, 4)).astype(np.float32)
SIGNS = (ROWS.mean((1, 2)) > 0).astype(np.int64)
WITHIN = [
    *(Functional, Recurrent),
    *(
        pytest.param(module, marks=pytest.mark.slow)
        for module in (Channels, Gated, Attending, AttendingFast, Encoding)
    ),
]


@pytest.mark.parametrize("module", WITHIN)
def test_all_dropout_stays_active(module):
    """The variance is that of the network in training mode, and rows share masks."""
    net = seeded(classifier(module, max_epochs=2), ROWS, SIGNS)
    model = MCDropoutClassifier(FrozenEstimator(net), n_samples=400, random_state=0)
    model.fit(ROWS, SIGNS)
    found = model.latent_mean_and_variance(ROWS[:20])[1]
    with private_rng(0), torch.no_grad():
        net.module_.train().norm.eval()
        draws = [net.module_(torch.from_numpy(ROWS[:20])) for _ in range(400)]
    expected = torch.stack(draws).var(0).numpy()
    # the steps of packed sequences share a mask as well
    bound = 0.5 if module is Gated else 0.15
    assert np.sqrt(found / expected).mean() == pytest.approx(1, abs=bound)
    proba = model.set_params(n_samples=9).fit(ROWS, SIGNS).predict_proba(ROWS)
    alone = np.vstack([model.predict_proba(row[None]) for row in ROWS[:3]])
    np.testing.assert_allclose(alone, proba[:3], atol=1e-6)
    turned = model.predict_proba(ROWS[::-1].copy())[::-1]
    np.testing.assert_allclose(turned, proba, atol=1e-6)


class InTrainingOnly(Sequences):
    """A network that skips a layer of dropout in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.early, self.late = nn.Dropout(0.02), nn.Dropout(0.4)

    def body(self, X):
        hidden = self.early(self.first(X).mean(1).tanh())
        return self.second(self.late(hidden) if self.training else hidden)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (ByHand, ["training mode", "'ByHand'", "torch.nn.functional"]),
        (TimeFirst, ["training mode", "'TimeFirst'", "torch.nn.functional"]),
        (InTrainingOnly, ["'late'", "only if self.training", "every forward pass"]),
    ],
)
def test_masks_that_differ_between_samples_or_modes_are_refused(module, words):
    net = classifier(module, callbacks=[RecordTraining()])
    refused_fit(MCDropoutClassifier(net, random_state=0), *words, data=(ROWS, SIGNS))


def test_dropout_within_layers_is_active_after_training_in_fit():
    model = MCDropoutClassifier(classifier(Recurrent, max_epochs=2), random_state=0)
    variance = model.fit(ROWS, SIGNS).latent_mean_and_variance(ROWS)[1]
    assert (variance > 0).all()

"""Networks beyond `CASES`: one of each common kind, and traps for sample axes.

In ``TRAPS``, the position of a sample in a layer's input depends on the values of the
batch. In ``REFUSED``, the outputs depend on the batch.
"""

from typing import Any

import torch
from cases import CASES, Case, Net, indices, normal, rows
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

Sequential, Linear = nn.Sequential, nn.Linear


def stack(*layers: nn.Module) -> nn.Module:
    return Sequential(*layers)


def net(run: Any, **parts: Any) -> Any:
    """Return a factory of networks; the parts depend on the number of outputs."""

    def make(c: int) -> nn.Module:
        return Net(run, **{name: part(c) for name, part in parts.items()})

    return make


def linear(n_in: int, n_out: int, **options: Any) -> Any:
    return lambda _c: Linear(n_in, n_out, **options)


def head(n_in: int, **options: Any) -> Any:
    return lambda c: Linear(n_in, c, **options)


def made(layer: Any) -> Any:
    return lambda _c: layer()


def parameter(*shape: int) -> Any:
    return lambda _c: nn.Parameter(0.5 * normal(*shape, seed=31))


# ------------------------------------------------------------------------ activations


def prelu(c: int) -> nn.Module:
    return stack(Linear(3, 4), nn.PReLU(4), Linear(4, c))


# ----------------------------------------------------------------------- convolutions
def flat(c: int, n: int, *layers: nn.Module) -> nn.Module:
    return stack(*layers, nn.Flatten(), Linear(n, c))


def deconvolution(c: int) -> nn.Module:
    up = nn.ConvTranspose2d(2, 2, 2, stride=2)
    return stack(up, nn.Tanh(), nn.Conv2d(2, 2, 2), nn.AdaptiveAvgPool2d(2)).append(
        stack(nn.Flatten(), Linear(8, c))
    )


def pooled(c: int) -> nn.Module:
    conv = nn.Conv2d(2, 3, 3, padding=1)
    return flat(c, 12, conv, nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(3))


def unet(self: Any, x: Tensor) -> Tensor:
    h = self.down(x).relu()
    up = functional.interpolate(self.inner(h).tanh(), scale_factor=2)
    return self.head(self.up(torch.cat([x, up], 1)).mean((2, 3)))


# ------------------------------------------------------------------------------ norms
def group_norm(c: int) -> nn.Module:
    return flat(c, 64, nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4), nn.ReLU())


def rms_norm(self: Any, x: Tensor) -> Tensor:
    h = self.first(x)
    return self.head(self.gain * h / (h**2).mean(-1, keepdim=True).add(1e-3).sqrt())


# ------------------------------------------------------------------ tokens, sequences
def tied_tokens(self: Any, x: Tensor) -> Tensor:
    """Similarity of the mean token to every token, with a tied weight."""
    h = self.inner(self.tokens(x).mean(1)).tanh()
    return self.head(h @ self.tokens.weight.T)


def decoder(self: Any, x: Tensor) -> Tensor:
    memory = self.project(x)
    return self.head(self.layer(self.query.expand(len(x), -1, -1), memory).flatten(1))


def masked_attention(self: Any, x: Tensor) -> Tensor:
    mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
    return self.head(self.layer(x, x, x, attn_mask=mask)[0][:, -1])


def patches(self: Any, x: Tensor) -> Tensor:
    """Vision transformer with a class token before the patch tokens."""
    tokens = self.embed(x).flatten(2).mT
    tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.places
    return self.head(self.layer(tokens)[:, 0])


def encoder_layer(**options: Any) -> Any:
    known = {"dropout": 0.0, "batch_first": True, **options}
    return made(lambda: nn.TransformerEncoderLayer(4, 2, 3, **known))


def pooling_attention(self: Any, x: Tensor) -> Tensor:
    h = self.first(x).tanh()
    return self.head((self.score(h).softmax(1) * h).sum(1))


def packed(self: Any, x: Tensor) -> Tensor:
    lengths = torch.full((len(x),), x.shape[1])
    wrapped = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    return self.head(self.cells(wrapped)[1][-1])


def cell_loop(self: Any, x: Tensor) -> Tensor:
    state = None
    for step in x.unbind(1):
        state = self.cell(step, state)
    return self.head(state[0])


def last_step(self: Any, x: Tensor) -> Tensor:
    return self.head(self.cells(x)[0][:, -1])


def feedback(self: Any, x: Tensor) -> Tensor:
    """Network whose outputs are inputs of the next step."""
    y = x.new_zeros(len(x), self.head.out_features)
    h = x.new_zeros(len(x), 3)
    for step in x.unbind(1):
        h = self.cell(torch.cat([step, y, h], 1)).tanh()
        y = self.head(h)
    return y


def sequence_outputs(self: Any, x: Tensor) -> Tensor:
    """Network with one output per position, read as several outputs."""
    return self.head(self.first(x).tanh()).flatten(1)


# -------------------------------------------------------------- reparametrised weights
def normed(wrap: Any, make: Any) -> Any:
    return lambda c: stack(wrap(make()), nn.Tanh(), nn.Flatten(), Linear(3, c))


def old_weight_norm(c: int) -> nn.Module:
    return Net(by_module, inner=HookNorm(), head=Linear(3, c))


class HookNorm(nn.Module):
    """A layer whose weight a hook sets before each call, like old weight_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(3, 3)
        weight = self.layer.weight.detach()
        del self.layer._parameters["weight"]
        self.layer.weight_g = nn.Parameter(weight.norm(dim=1, keepdim=True))
        self.layer.weight_v = nn.Parameter(weight)
        self.layer.register_forward_pre_hook(set_weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def set_weight(layer: Any, _args: Any) -> None:
    v = layer.weight_v
    layer.weight = layer.weight_g * v / v.norm(dim=1, keepdim=True)


def by_module(self: Any, x: Tensor) -> Tensor:
    return self.head(self.inner(x).tanh())


def normed_head(c: int) -> nn.Module:
    """Head without bias, with a reparametrised weight."""
    last = parametrizations.weight_norm(Linear(4, c, bias=False))
    return stack(Linear(3, 4), nn.Tanh(), last)


class Doubling(nn.Module):
    """A layer whose output is changed by a user's hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(3, 3)
        self.layer.register_forward_hook(double)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


def double(_layer: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return 2 * output


# ------------------------------------------------------------------- bare parameters
def einsum(self: Any, x: Tensor) -> Tensor:
    return self.head(torch.einsum("ni,ihd->nhd", x, self.w).relu().flatten(1))


def bilinear(self: Any, x: Tensor) -> Tensor:
    return self.head(self.pair(x, x).tanh())


def mixture(self: Any, x: Tensor) -> Tensor:
    outputs = torch.stack([self.one(x), self.two(x).tanh()], 1)
    return (self.gate(x).softmax(1).unsqueeze(2) * outputs).sum(1)


def checkpointed(self: Any, x: Tensor) -> Tensor:
    again = torch.utils.checkpoint.checkpoint
    return self.head(again(lambda h: self.first(h).tanh(), x, use_reentrant=False))


def adapter(self: Any, x: Tensor) -> Tensor:
    """Low-rank update, initially zero, added to a frozen layer."""
    return self.head((self.body(x) + self.up(self.down(x))).tanh())


def frozen(n_in: int, n_out: int) -> Any:
    return made(lambda: Linear(n_in, n_out).requires_grad_(False))


# ------------------------------------------------------------------------------ heads
def two_heads(self: Any, x: Tensor) -> Tensor:
    h = self.first(x).tanh()
    return torch.cat([self.mean(h), self.spread(h)], 1)


def head_list(self: Any, x: Tensor) -> Tensor:
    h = self.first(x).tanh()
    return torch.cat([one(h) for one in self.heads], 1)


def towers(self: Any, x: Tensor) -> Tensor:
    one, two = self.first(x).tanh(), self.second(x).relu()
    return torch.cat([self.one(one), self.two(self.extra(two).relu())], 1)


def wide_and_deep(self: Any, x: Tensor) -> Tensor:
    return self.head(self.first(x).tanh()) + self.wide(x)


def residual_output(self: Any, x: Tensor) -> Tensor:
    h = self.first(x)
    return h + self.head(h.tanh())


def shared_head(self: Any, x: Tensor) -> Tensor:
    return self.head(self.first(x).tanh()) - self.head(self.second(x).tanh())


def chosen_head(self: Any, x: Tensor) -> Tensor:
    """Both heads for all samples, and then a choice: what an error message advises."""
    h = self.first(x).tanh()
    return torch.where(x[:, :1] > 0.7, self.one(h), self.two(h))


def heads(c: int) -> nn.ModuleList:
    return nn.ModuleList(Linear(4, 1) for _ in range(c))


# ------------------------------------------------------------------ samples and layers
def sample_loop(self: Any, x: Tensor) -> Tensor:
    """Layer called for each sample, without an axis of samples."""
    return self.head(torch.stack([self.first(row).tanh() for row in x]))


def in_pairs(self: Any, x: Tensor) -> Tensor:
    """Layer called for two samples at a time."""
    return self.head(torch.cat([self.first(part).tanh() for part in x.split(2)]))


def flipped(self: Any, x: Tensor) -> Tensor:
    return self.head(self.first(x.flip(0)).tanh().flip(0))


def rolled(self: Any, x: Tensor) -> Tensor:
    return self.head(self.first(x.roll(1, 0)).tanh().roll(-1, 0))


def rare_use(self: Any, x: Tensor) -> Tensor:
    """Weight used a second time if an input is large."""
    h = self.first(x).tanh()
    again = functional.linear(h, self.first.weight.T)
    return self.head(torch.cat([h, (x[:, :1] - 0.5).relu() * again], 1))


def replaced_forward(c: int) -> nn.Module:
    """Layer with a replaced `forward`, as adapters replace it."""
    layer = Linear(3, 3)
    layer.forward = Replaced(layer)
    return stack(layer, nn.Tanh(), Linear(3, c))


class Replaced:
    """The layer's own forward, with another use of the weight for large inputs."""

    def __init__(self, layer: nn.Linear) -> None:
        self.weight, self.bias = layer.weight, layer.bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias) + (x - 1).relu()


# ------------------------------------------------------------------------------ traps
def order(x: Tensor) -> Tensor:
    return x[:, 0].argsort()


def sorted_samples(self: Any, x: Tensor) -> Tensor:
    o = order(x)
    return self.head(self.first(x[o]).tanh()[o.argsort()])


def sorted_twice(self: Any, x: Tensor) -> Tensor:
    """One layer sees the samples in order, another sees them sorted."""
    o = order(x)
    h = self.second(self.first(x).tanh()[o]).relu()[o.argsort()]
    return self.head(h)


def sorted_head(self: Any, x: Tensor) -> Tensor:
    o = order(x)
    return self.head(self.first(x).tanh()[o])[o.argsort()]


def by_expert(self: Any, x: Tensor) -> Tensor:
    """Network that groups the samples by the sign of an input."""
    o = (x[:, 0] > 0).long().argsort(stable=True)
    return self.head(self.first(x[o]).tanh()[o.argsort()])


def routed(self: Any, x: Tensor) -> Tensor:
    """Network that sends each sample to one of two layers."""
    h = x.new_zeros(len(x), 4)
    is_first = x[:, 0] > 0
    h[is_first] = self.one(x[is_first])
    h[~is_first] = self.two(x[~is_first])
    return self.head(h.tanh())


def branch(self: Any, x: Tensor) -> Tensor:
    """Layer only for samples with a large input: a few samples, or one."""
    h = self.first(x).tanh()
    large = x[:, 0] > 0.7
    h = h.clone()
    h[large] = self.branch(h[large])
    return self.head(h)


def rare_expert(self: Any, x: Tensor) -> Tensor:
    """Layer called for at most one sample."""
    h, large = self.first(x).tanh(), x[:, 0] > 1.95
    if not large.any():
        return self.head(h)
    h = h.clone()
    h[large] = self.branch(h[large]).tanh()
    return self.head(h)


def only_large(self: Any, x: Tensor) -> Tensor:
    """Network that sorts the samples if one of them is large."""
    o = order(x) if bool((x > 1.5).any()) else torch.arange(len(x))
    return self.head(self.first(x[o]).tanh()[o.argsort()])


PARTS = {"first": linear(3, 4), "head": head(4)}
IMAGE, SERIES, VECTOR = rows(2, 4, 4), rows(3, 4), rows(3)

TRAPS: dict[str, Case] = {
    "rare_expert": Case(net(rare_expert, branch=linear(4, 4), **PARTS), VECTOR),
    "sorted": Case(net(sorted_samples, **PARTS), VECTOR),
    "sorted_twice": Case(net(sorted_twice, second=linear(4, 4), **PARTS), VECTOR),
    "sorted_head": Case(net(sorted_head, **PARTS), VECTOR),
    "by_expert": Case(net(by_expert, **PARTS), VECTOR),
    "routed": Case(
        net(routed, one=linear(3, 4), two=linear(3, 4), head=head(4)), VECTOR
    ),
    "branch": Case(net(branch, branch=linear(4, 4), **PARTS), VECTOR),
    "only_large": Case(net(only_large, **PARTS), VECTOR),
    "flipped": Case(net(flipped, **PARTS), VECTOR),
    "rolled": Case(net(rolled, **PARTS), VECTOR),
    "rare_use": Case(net(rare_use, **{**PARTS, "head": head(7)}), VECTOR),
    "replaced_forward": Case(replaced_forward, VECTOR),
    "sample_loop": Case(net(sample_loop, **PARTS), VECTOR),
    "in_pairs": Case(net(in_pairs, **PARTS), VECTOR),
}

KINDS: dict[str, Case] = {
    "prelu": Case(prelu, VECTOR),
    "deconvolution": Case(deconvolution, rows(2, 3, 3)),
    "pooled": Case(pooled, IMAGE),
    "unet": Case(
        net(
            unet,
            down=made(lambda: nn.Conv2d(2, 3, 2, stride=2)),
            inner=made(lambda: nn.Conv2d(3, 2, 1)),
            up=made(lambda: nn.Conv2d(4, 3, 3, padding=1)),
            head=head(3),
        ),
        IMAGE,
    ),
    "group_norm": Case(group_norm, IMAGE),
    "rms_norm": Case(net(rms_norm, gain=parameter(4), **PARTS), VECTOR),
    "tied_tokens": Case(
        net(
            tied_tokens,
            tokens=made(lambda: nn.Embedding(5, 3)),
            inner=linear(3, 3),
            head=head(5),
        ),
        indices(4, 5),
    ),
    "embedding_bag": Case(
        lambda c: stack(nn.EmbeddingBag(5, 3), nn.Tanh(), Linear(3, c)), indices(4, 5)
    ),
    "decoder": Case(
        net(
            decoder,
            project=linear(4, 4),
            query=parameter(1, 2, 4),
            layer=made(
                lambda: nn.TransformerDecoderLayer(
                    4, 2, 3, dropout=0.0, batch_first=True
                )
            ),
            head=head(8),
        ),
        SERIES,
    ),
    "masked_attention": Case(
        net(
            masked_attention,
            layer=made(lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
            head=head(4),
        ),
        SERIES,
    ),
    "patches": Case(
        net(
            patches,
            embed=made(lambda: nn.Conv2d(2, 4, 2, stride=2)),
            token=parameter(1, 1, 4),
            places=parameter(5, 4),
            layer=encoder_layer(norm_first=True, activation="gelu"),
            head=head(4),
        ),
        IMAGE,
    ),
    "pooling_attention": Case(
        net(pooling_attention, first=linear(4, 3), score=linear(3, 1), head=head(3)),
        SERIES,
    ),
    "bilstm": Case(
        net(
            last_step,
            cells=made(lambda: nn.LSTM(4, 2, 2, batch_first=True, bidirectional=True)),
            head=head(4),
        ),
        SERIES,
    ),
    "packed": Case(
        net(packed, cells=made(lambda: nn.GRU(4, 3, batch_first=True)), head=head(3)),
        SERIES,
    ),
    "cell_loop": Case(
        net(cell_loop, cell=made(lambda: nn.LSTMCell(4, 3)), head=head(3)), SERIES
    ),
    "feedback": Case(
        net(feedback, cell=lambda c: Linear(4 + c + 3, 3), head=head(3)), SERIES
    ),
    "sequence_outputs": Case(
        net(sequence_outputs, first=linear(4, 3), head=linear(3, 1)), rows(2, 4)
    ),
    "old_weight_norm": Case(old_weight_norm, VECTOR),
    "conv_weight_norm": Case(
        normed(parametrizations.weight_norm, lambda: nn.Conv1d(3, 1, 2)), SERIES
    ),
    "spectral_norm": Case(
        normed(parametrizations.spectral_norm, lambda: Linear(3, 3)), VECTOR
    ),
    "normed_head": Case(normed_head, VECTOR),
    "user_hook": Case(net(by_module, inner=made(Doubling), head=head(3)), VECTOR),
    "einsum": Case(net(einsum, w=parameter(3, 2, 2), head=head(4)), VECTOR),
    "bilinear": Case(
        net(bilinear, pair=made(lambda: nn.Bilinear(3, 3, 3)), head=head(3)), VECTOR
    ),
    "mixture": Case(net(mixture, gate=linear(3, 2), one=head(3), two=head(3)), VECTOR),
    "checkpointed": Case(net(checkpointed, **PARTS), VECTOR),
    "adapter": Case(
        net(
            adapter,
            body=frozen(3, 4),
            down=linear(3, 1, bias=False),
            up=made(lambda: Linear(1, 4, bias=False)),
            head=head(4),
        ),
        VECTOR,
    ),
    "two_heads": Case(
        net(
            two_heads,
            first=linear(3, 4),
            mean=linear(4, 1),
            spread=lambda c: Linear(4, c - 1),
        ),
        VECTOR,
    ),
    "head_list": Case(net(head_list, first=linear(3, 4), heads=heads), VECTOR),
    "towers": Case(
        net(
            towers,
            first=linear(3, 2),
            second=linear(3, 2),
            one=linear(2, 1),
            extra=linear(2, 2),
            two=lambda c: Linear(2, c - 1),
        ),
        VECTOR,
    ),
    "chosen_head": Case(
        net(chosen_head, first=linear(3, 4), one=head(4), two=head(4)), VECTOR
    ),
    "wide_and_deep": Case(net(wide_and_deep, wide=head(3), **PARTS), VECTOR),
    "residual_output": Case(
        net(residual_output, first=head(3), head=lambda c: Linear(c, c)), VECTOR
    ),
    "shared_head": Case(net(shared_head, second=linear(3, 4), **PARTS), VECTOR),
}

ZOO = {**CASES, **KINDS, **TRAPS}


# ---------------------------------------------------------------------------- refused
def minus_mean(self: Any, x: Tensor) -> Tensor:
    h = self.first(x)
    return self.head((h - h.mean(0)).tanh())


def minus_mean_of_many(self: Any, x: Tensor) -> Tensor:
    """Only a whole batch reveals the dependence; the first few samples do not."""
    return minus_mean(self, x) if len(x) > 20 else self.head(self.first(x).tanh())


def attends_to_batch(self: Any, x: Tensor) -> Tensor:
    h = self.first(x)
    return self.head((h @ h.T).softmax(1) @ h)


def sorted_outputs(self: Any, x: Tensor) -> Tensor:
    return self.head(self.first(x[order(x)]).tanh())


def noisy(self: Any, x: Tensor) -> Tensor:
    return self.head(functional.dropout(self.first(x).tanh(), 0.5, training=True))


def batch_statistics(c: int) -> nn.Module:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    return stack(Linear(3, 4), norm, nn.Tanh(), Linear(4, c))


REFUSED: dict[str, Case] = {
    "minus_mean": Case(net(minus_mean, **PARTS), VECTOR),
    "minus_mean_of_many": Case(net(minus_mean_of_many, **PARTS), VECTOR),
    "attends_to_batch": Case(net(attends_to_batch, **PARTS), VECTOR),
    "sorted_outputs": Case(net(sorted_outputs, **PARTS), VECTOR),
    "noisy": Case(net(noisy, **PARTS), VECTOR),
    "batch_statistics": Case(batch_statistics, VECTOR),
}

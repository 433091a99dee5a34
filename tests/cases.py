"""Small networks in float64, each with one feature that is easy to get wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sklaplace.networks.forward import Forward

DOUBLE = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=generator(seed))


def positive(*shape: int, seed: int = 0) -> Tensor:
    """Return entries between 0.3 and 1.8."""
    return 0.3 + 1.5 * torch.rand(shape, dtype=DOUBLE, generator=generator(seed))


@dataclass(frozen=True)
class Case:
    """A network and its rows.

    ``make(n_outputs)`` returns the module and ``rows(n)`` a batch. ``dense`` names
    the parameters whose rows cannot have the form ``Σᵣ g ⊗ a``.
    """

    make: Callable[[int], nn.Module]
    rows: Callable[[int], Any]
    dense: frozenset[str] = frozenset()

    def forward(self, n_outputs: int = 3) -> Forward:
        """Return the network as the package sees it: float64 and evaluation mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = self.make(n_outputs).double().eval()
        # biases that start at zero and scales that start at one hide mistakes
        for index, parameter in enumerate(module.parameters()):
            noise = normal(*parameter.shape, seed=100 + index)
            parameter.data += 0.2 * noise
        forward = Forward(module, lambda x: call(module, x))
        module.requires_grad_(False)
        return forward


def call(module: nn.Module, x: Any) -> Any:
    return module(**x) if isinstance(x, dict) else module(x)


class Net(nn.Module):
    """A module whose parts and forward function are given as arguments."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def rows(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: normal(n, *shape, seed=7)


def indices(length: int, n_words: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(n_words, (n, length), generator=generator(8))


def names(*parameters: str) -> frozenset[str]:
    return frozenset(parameters)


def layers(*modules: str) -> frozenset[str]:
    """Return the names of the weights and biases of layers."""
    return names(*(f"{module}.{kind}" for module in modules for kind in KINDS))


KINDS = "weight", "bias"


# -------------------------------------------------------------- plain networks
def mlp(c: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, c))


def without_bias(c: int) -> nn.Module:
    first, last = nn.Linear(2, 3, bias=False), nn.Linear(3, c, bias=False)
    return nn.Sequential(first, nn.Tanh(), last)


def inplace(c: int) -> nn.Module:
    leaky, elu = nn.LeakyReLU(0.3, inplace=True), nn.ELU(inplace=True)
    return nn.Sequential(nn.Linear(2, 3), leaky, nn.Linear(3, 3), elu, nn.Linear(3, c))


def cnn(c: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 2, (3, 2), stride=(2, 1), padding=(1, 0)),
        nn.ELU(inplace=True),
        nn.Conv2d(2, 2, 2, dilation=(1, 2), bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8, c),
    )


def conv1d(c: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 2, 3, dilation=2, padding="same"),
        nn.Tanh(),
        nn.Conv1d(2, 2, 3, padding=2, padding_mode="circular", stride=2),
        nn.Conv1d(2, 1, 2, padding="valid"),
        nn.Flatten(),
        nn.Linear(3, c),
    )


def conv3d(c: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 2, (2, 1, 3), padding=(1, 0, 1), padding_mode="replicate"),
        nn.Tanh(),
        nn.Conv3d(2, 2, 2, stride=(2, 1, 2), groups=2),
        nn.Flatten(),
        nn.Linear(4, c),
    )


def conv_same(c: int) -> nn.Module:
    """Convolution whose padding differs between the two ends of an axis."""
    layer = nn.Conv2d(1, 2, (2, 3), padding="same", padding_mode="reflect")
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(18, c))


def sequence(c: int) -> nn.Module:
    """Linear layers on (b, s, d) and (b, s, t, d)."""

    def run(net: Any, x: Tensor) -> Tensor:
        h = net.first(x).tanh_()
        return net.head(net.second(h.unsqueeze(2)).tanh().mean((1, 2)))

    first, second, head = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, c)
    return Net(run, first=first, second=second, head=head)


def head_on_positions(c: int) -> nn.Module:
    """Last layer applied at every position, then averaged."""

    def run(net: Any, x: Tensor) -> Tensor:
        return net.head(net.first(x).tanh()).mean(1)

    return Net(run, first=nn.Linear(2, 3), head=nn.Linear(3, c))


def affine_head(c: int) -> nn.Module:
    """Last layer followed by a fixed affine map that mixes the outputs."""

    def run(net: Any, x: Tensor) -> Tensor:
        return net.head(net.first(x).tanh()) @ net.mix + net.shift

    net = Net(run, first=nn.Linear(2, 3), head=nn.Linear(3, 4))
    net.register_buffer("mix", normal(4, c, seed=1))
    net.register_buffer("shift", normal(c, seed=2))
    return net


# ------------------------------------------------------------- shared weights
def called_twice(c: int) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        h = net.shared(x).tanh()
        return net.head(nn.functional.elu(net.shared(h), inplace=True))

    return Net(run, shared=nn.Linear(3, 3), head=nn.Linear(3, c))


def conv_called_twice(c: int) -> nn.Module:
    """Convolution called for two input sizes, with different numbers of positions."""

    def run(net: Any, x: Tensor) -> Tensor:
        h = nn.functional.leaky_relu_(net.shared(x), 0.2)
        h = nn.functional.elu(net.shared(h), inplace=True)
        return net.head(h.flatten(1))

    return Net(run, shared=nn.Conv2d(2, 2, 2), head=nn.Linear(8, c))


def two_names(c: int) -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(3, c))


def tied(c: int) -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(3, c))


def functional_use(c: int) -> nn.Module:
    """Auto-encoder weight, used by its layer and again transposed."""

    def run(net: Any, x: Tensor) -> Tensor:
        h = net.encoder(x).tanh()
        return net.head(nn.functional.linear(h, net.encoder.weight.T).tanh())

    return Net(run, encoder=nn.Linear(2, 3), head=nn.Linear(2, c))


def reshaped(c: int) -> nn.Module:
    """Layer that receives positions on the axis of rows."""

    def run(net: Any, x: Tensor) -> Tensor:
        h = net.inner(x.reshape(-1, x.shape[-1])).tanh()
        return net.head(h.reshape(len(x), -1))

    return Net(run, inner=nn.Linear(2, 2), head=nn.Linear(6, c))


def transposed(c: int) -> nn.Module:
    """Layer that receives (s, b, d)."""

    def run(net: Any, x: Tensor) -> Tensor:
        return net.head(net.inner(x.transpose(0, 1)).tanh().mean(0))

    return Net(run, inner=nn.Linear(2, 2), head=nn.Linear(2, c))


def residual(c: int) -> nn.Module:
    """In-place additions to the output and to the input of a layer."""

    def run(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)
        h += net.second(torch.relu(h))
        h += x
        return net.head(h)

    first, second, head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, c)
    return Net(run, first=first, second=second, head=head)


def grouped(c: int) -> nn.Module:
    # eigenvectors of two outputs would be symmetric, which hides mistakes
    layer = nn.Conv2d(2, 6, 2, groups=2)
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(24, c))


def depthwise(c: int) -> nn.Module:
    layers = (
        nn.Conv1d(3, 3, 2, groups=3, padding=1, padding_mode="circular"),
        nn.Tanh(),
        nn.Conv1d(3, 6, 2, groups=3, stride=2, bias=False),
    )
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(12, c))


# ------------------------------------------------- layers without a layer form
def conv_transposed(c: int) -> nn.Module:
    layer = nn.ConvTranspose1d(2, 1, 2)
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(5, c))


def norms(c: int) -> nn.Module:
    batch_norm = nn.BatchNorm1d(3)
    batch_norm.running_mean += torch.tensor([0.1, -0.2, 0.3])
    batch_norm.running_var *= torch.tensor([0.5, 1.5, 2.0])
    first, middle = nn.Linear(2, 3), nn.LayerNorm(3)
    return nn.Sequential(first, batch_norm, nn.Tanh(), middle, nn.Linear(3, c))


def embedding(c: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, c))


def recurrent(kind: type[nn.Module]) -> Callable[[int], nn.Module]:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.head(net.cells(x)[0][:, -1])

    def make(c: int) -> nn.Module:
        cells = kind(2, 2, batch_first=True)
        return Net(run, cells=cells, head=nn.Linear(2, c))

    return make


def attention(c: int) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.head(net.layer(x).mean(1))

    layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True)
    return Net(run, layer=layer, head=nn.Linear(4, c))


def bare_parameters(c: int) -> nn.Module:
    """Parameters of the network itself; one is a number, one is unused."""

    def run(net: Any, x: Tensor) -> Tensor:
        return net.head(torch.tanh(net.gain * net.first(x)))

    net = Net(run, first=nn.Linear(2, 3), head=nn.Linear(3, c))
    net.gain = nn.Parameter(torch.tensor(1.3))
    net.unused = nn.Parameter(torch.ones(2))
    return net


def never_called(c: int) -> nn.Module:
    """Network with an unused layer."""
    net = Net(lambda net, x: net.head(net.first(x).tanh()))
    net.first, net.spare, net.head = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, c)
    return net


def weight_norm(c: int) -> nn.Module:
    inner = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    return nn.Sequential(inner, nn.Tanh(), nn.Linear(3, c))


def branching(c: int) -> nn.Module:
    """Python branch on the values of a row, which ``vmap`` cannot follow."""

    def run(net: Any, x: Tensor) -> Tensor:
        h = torch.stack([row if row.sum() > 0 else -2 * row for row in net.norm(x)])
        return net.head(h)

    return Net(run, norm=nn.LayerNorm(3), head=nn.Linear(3, c))


def dictionary(c: int) -> nn.Module:
    def run(net: Any, left: Tensor, right: Tensor) -> Tensor:
        return net.head(net.norm(net.first(left)).tanh() * right)

    first, norm, head = nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, c)
    return Net(run, first=first, norm=norm, head=head)


def linear_only(c: int) -> nn.Module:
    return nn.Linear(3, c)


def dictionary_rows(n: int) -> dict[str, Tensor]:
    return {"left": normal(n, 2, seed=7), "right": normal(n, 3, seed=9)}


RECURRENT = names(*(f"cells.{kind}_{of}h_l0" for kind in KINDS for of in "ih"))
WEIGHT_NORM = names(
    "0.parametrizations.weight.original0", "0.parametrizations.weight.original1"
)
ATTENTION = names("layer.self_attn.in_proj_weight", "layer.self_attn.in_proj_bias")

CASES: dict[str, Case] = {
    "mlp": Case(mlp, rows(2)),
    "without_bias": Case(without_bias, rows(2)),
    "inplace": Case(inplace, rows(2)),
    "linear_only": Case(linear_only, rows(3)),
    "cnn": Case(cnn, rows(2, 5, 5)),
    "conv1d": Case(conv1d, rows(2, 5)),
    "conv3d": Case(conv3d, rows(1, 3, 2, 3)),
    "conv_same": Case(conv_same, rows(1, 3, 3)),
    "sequence": Case(sequence, rows(4, 2)),
    "head_on_positions": Case(head_on_positions, rows(4, 2)),
    "affine_head": Case(affine_head, rows(2)),
    "called_twice": Case(called_twice, rows(3)),
    "conv_called_twice": Case(conv_called_twice, rows(2, 4, 4)),
    "two_names": Case(two_names, rows(3), layers("0")),
    "tied": Case(tied, rows(3), names("0.weight")),
    "functional_use": Case(functional_use, rows(2), names("encoder.weight")),
    "reshaped": Case(reshaped, rows(3, 2), layers("inner")),
    "transposed": Case(transposed, rows(3, 2), layers("inner")),
    "residual": Case(residual, rows(3)),
    "grouped": Case(grouped, rows(2, 3, 3)),
    "depthwise": Case(depthwise, rows(3, 4)),
    "conv_transposed": Case(conv_transposed, rows(2, 4), layers("0")),
    "norms": Case(norms, rows(2), layers("1", "3")),
    "embedding": Case(embedding, indices(3, 5), names("0.weight")),
    "lstm": Case(recurrent(nn.LSTM), rows(3, 2), RECURRENT),
    "gru": Case(recurrent(nn.GRU), rows(3, 2), RECURRENT),
    "bare_parameters": Case(bare_parameters, rows(2), names("gain", "unused")),
    "never_called": Case(never_called, rows(2), layers("spare")),
    "weight_norm": Case(weight_norm, rows(2), WEIGHT_NORM | names("0.bias")),
    "branching": Case(branching, rows(3), layers("norm")),
    "dictionary": Case(dictionary, dictionary_rows, layers("norm")),
    "attention": Case(
        attention,
        rows(3, 4),
        ATTENTION | layers("layer.self_attn.out_proj", "layer.norm1", "layer.norm2"),
    ),
}

"""Forward: the user's network as a function from a batch to outputs (b, c).

Networks say the same thing in different ways: logits, probabilities, a squeezed
axis. Here all become the outputs that the likelihood is written for, without a
change to the network.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# log of the smallest probability that is told apart from zero in float32
_SMALLEST = torch.finfo(torch.float32).tiny


def _identity(outputs: Tensor) -> Tensor:
    return outputs


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(min=_SMALLEST).log()


def _logit(probabilities: Tensor) -> Tensor:
    eps = torch.finfo(probabilities.dtype).eps / 2
    return probabilities.clamp(eps, 1 - eps).logit()


OUTPUT_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": _identity,
    "log": _log,
    "logit": _logit,
}


class Forward(nn.Module):
    """Calls a network and returns its outputs as (b, c).

    Parameters
    ----------
    module : nn.Module
        The network; its parameters are the ones that are differentiated.
    call : callable
        ``call(x)`` runs ``module`` on a batch, for instance ``net.infer``.
    output_map : str, default="identity"
        Key of ``OUTPUT_MAPS``, applied to what the network returns.
    logit_layer : str or None, default=None
        Name of the submodule whose output is taken instead, such as the layer
        before a softmax: it has the logits to full precision.
    shape : tuple of int or None, default=None
        What the network returns per row, where it is known: maps of another size
        would be read at the wrong positions.

    Attributes
    ----------
    trainable : frozenset of str
        Names of the parameters that had ``requires_grad`` when this was made.
    takes_many : bool
        False once an operator has refused to run under many weights at a time.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[Any], Any],
        output_map: str = "identity",
        logit_layer: str | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.call = call
        self.output_map = output_map
        self.logit_layer = logit_layer
        self.shape = shape
        self.takes_many = True
        named = module.named_parameters()
        self.trainable = frozenset(name for name, p in named if p.requires_grad)

    def reading(self, output_map: str, logit_layer: str | None) -> "Forward":
        """The same network, its outputs read in another way."""
        other = Forward(self.module, self.call, output_map, logit_layer, self.shape)
        other.trainable = self.trainable
        return other

    def forward(self, x: Any) -> Tensor:
        """Outputs (b, c) of a batch."""
        if self.logit_layer is None:
            outputs = OUTPUT_MAPS[self.output_map](first_tensor(self.call(x)))
        else:
            outputs = self._tapped(x)
        self._check_maps(tuple(outputs.shape[1:]))
        return as_columns(outputs)

    def _check_maps(self, shape: tuple[int, ...]) -> None:
        """Refuse maps that are not of the size seen in fit."""
        if self.shape is None or max(len(shape), len(self.shape)) < 2:
            return
        if shape != self.shape:
            raise ValueError(
                f"The network gives maps of shape {shape} for these rows, but "
                f"{self.shape} in fit. Pass maps of one size."
            )

    def _tapped(self, x: Any) -> Tensor:
        """Output of the tapped submodule while the network runs."""
        with tapping(self.module, str(self.logit_layer)) as seen:
            self.call(x)
        return seen[-1]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Evaluation mode without parameter gradients; restored in any case."""
        training = [(m, m.training) for m in self.module.modules()]
        gradients = [(p, p.requires_grad) for p in self.module.parameters()]
        try:
            self.module.eval().requires_grad_(False)
            yield
        finally:
            for module, flag in training:
                module.training = flag
            for parameter, flag in gradients:
                parameter.requires_grad_(flag)


@contextmanager
def tapping(module: nn.Module, name: str) -> Iterator[list[Tensor]]:
    """What a submodule puts out meanwhile, pass by pass."""
    seen: list[Tensor] = []
    layer = module.get_submodule(name)
    handle = layer.register_forward_hook(lambda _m, _i, out: seen.append(out))
    try:
        yield seen
    finally:
        handle.remove()


def as_columns(outputs: Tensor) -> Tensor:
    """Outputs as (b, c); of classes at positions one position after the other."""
    if outputs.ndim > 2:
        return outputs.movedim(1, -1).flatten(1)
    return outputs.unsqueeze(-1) if outputs.ndim == 1 else outputs


def first_tensor(outputs: Any) -> Tensor:
    """What skorch takes for the prediction: the first of several outputs."""
    first: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return first


@contextmanager
def requiring_grad(leaves: Iterable[nn.Parameter]) -> Iterator[None]:
    """Parameters of a frozen network as leaves of a graph."""
    leaves = list(leaves)
    for leaf in leaves:
        leaf.requires_grad_()
    try:
        yield
    finally:
        for leaf in leaves:
            leaf.requires_grad_(False)

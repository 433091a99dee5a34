"""Forward: a network as a function from a batch to outputs (b, c).

Modules return logits, log-probabilities or probabilities, and some return shape (b,).
`Forward` converts these outputs to parameters of the likelihood. The module stays
unchanged.
"""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from threading import RLock
from typing import Any

import torch
from skorch import NeuralNet
from torch import Tensor, nn

from sklaplace.core.parallel import one_thread
from sklaplace.core.trees import copied, mapped
from sklaplace.networks.tabular import TabularNetwork

# Threads share the modes, hooks and gradient flags of a network.
_EVALUATION = RLock()
if hasattr(os, "register_at_fork"):  # not on Windows
    # after a fork, there is no other thread to restore a network or to unlock
    os.register_at_fork(
        before=_EVALUATION.acquire,
        after_in_parent=_EVALUATION.release,
        after_in_child=_EVALUATION.release,
    )

# smallest normal float32; with this bound, the logarithm of any probability is finite
_SMALLEST = torch.finfo(torch.float32).tiny


def _logs(outputs: Tensor) -> Tensor:
    """Return log-probabilities; only these have negative entries."""
    logs = outputs.clamp(min=_SMALLEST).log()
    return torch.where((outputs < 0).any(), outputs, logs)


OUTPUT_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda outputs: outputs,
    "log": _logs,
    "logit": lambda p: p.logit(eps=torch.finfo(p.dtype).eps / 2),
}


def logits_match(
    logits: Tensor, raw: Tensor, is_binary: bool, tolerance: float = 0.0
) -> Tensor:
    """Return whether the logits of each sample imply its probabilities, (b,).

    Both tensors are (b, ...), and ``raw`` contains probabilities or their logarithms.
    With ``is_binary``, a sigmoid maps logits to probabilities, and otherwise a softmax.
    The relative ``tolerance`` of log-probabilities is at least a few rounding errors.
    The comparison ignores probabilities close to zero.
    """
    # a few rounding errors; in float32 more, because a softmax sums over many classes
    tolerance = max(1e-4, 4 * rounding([raw, logits]), tolerance)
    implied = nn.functional.logsigmoid(logits) if is_binary else logits.log_softmax(1)
    proba = torch.where((raw < 0).any(), raw.exp(), raw)  # only logarithms are negative
    # Near the smallest normal number, digits are lost, hence a limit a million times as
    # large. In float16 this would exceed one, so the limit is 0.01.
    has_digits = proba > min(torch.finfo(proba.dtype).tiny * 1e6, 0.01)
    # relative errors of large logarithms, absolute errors of those close to zero
    is_near = (implied - proba.log()).abs() <= tolerance * (1 + implied.abs())
    return (is_near | ~has_digits).reshape(len(proba), -1).all(1)


def read_logits(raw: Tensor, calls: list[Tensor], probability_map: str) -> Tensor:
    """Return logits (b, ...) for the probabilities ``raw`` of a network.

    ``calls`` has the output of each call of the layer that should return the logits. If
    the layer was not called exactly once, or if its output for a sample does not imply
    the sample's probabilities, ``probability_map`` computes the logits instead. They
    then have fewer digits.
    """
    fallback = OUTPUT_MAPS[probability_map](at_least_single(raw))
    if len(calls) != 1 or calls[0].numel() != raw.numel():
        return fallback
    logits = calls[0].reshape(raw.shape)
    is_match = logits_match(logits, raw, is_binary=probability_map == "logit")  # (b,)
    # with further axes of length one, to broadcast against (b, ...)
    is_match = is_match.reshape(-1, *[1] * (raw.ndim - 1))
    return torch.where(is_match, logits, fallback)


class Forward(nn.Module):
    """Network as a function that returns outputs (b, c); see `first_tensor`.

    Parameters
    ----------
    module : nn.Module
        Network. Derivatives are taken with respect to its parameters.
    call : callable
        ``call(x)`` runs ``module`` on a batch, for instance ``net.infer``.
    output_map : str, default="identity"
        Key of ``OUTPUT_MAPS``, the map applied to the network's outputs.
    logit_layer : str or None, default=None
        Name of the submodule that returns the logits, such as the layer before a
        softmax. For all samples with matching probabilities, logits at full precision
        are read from this submodule.
    shape : tuple of int or None, default=None
        Output shape of one sample, if known. Some image networks accept images of other
        sizes, but then return outputs at other positions.
    probability_map : str, default="log"
        Key of ``OUTPUT_MAPS`` for probabilities that disagree with the logit layer.

    Attributes
    ----------
    trainable : frozenset of str
        Names of the parameters that had ``requires_grad`` at construction.
    rounding : float
        Relative rounding error of layer outputs, if known.
    limit : callable
        Returns a context for evaluation. The default network, which gains nothing from
        several threads, is evaluated on one.
    takes_many : bool
        Whether ``torch.func.vmap`` over weights works; False once an operator fails.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[object], object],
        output_map: str = "identity",
        logit_layer: str | None = None,
        shape: tuple[int, ...] | None = None,
        probability_map: str = "log",
    ) -> None:
        super().__init__()
        self.module, self.call, self.takes_many = module, call, True
        self.rounding = 0.0
        self.output_map, self.logit_layer, self.shape = output_map, logit_layer, shape
        self.probability_map = probability_map
        is_default = any(isinstance(m, TabularNetwork) for m in module.modules())
        self.limit = one_thread if is_default else nullcontext
        named = module.named_parameters()
        self.trainable = frozenset(name for name, p in named if p.requires_grad)

    def with_output_map(self, output_map: str, logit_layer: str | None) -> "Forward":
        """Return a `Forward` with another output map and logit layer."""
        other = copy.copy(self)
        other.output_map, other.logit_layer = output_map, logit_layer
        return other

    def twin(self) -> "Forward":
        """Return a `Forward` for a copy of the network, with the same output map."""
        module = copy.deepcopy(self.module)
        net = getattr(self.call, "__self__", None)  # call is net.infer or the module
        call = module if net is None else with_attributes(net, module_=module).infer
        # a new object, because copying self would copy the network again
        twin = Forward(module, call, probability_map=self.probability_map)
        twin.output_map, twin.logit_layer = self.output_map, self.logit_layer
        twin.shape = self.shape
        return twin

    def returned(self, x: object) -> object:
        """Apply the network to a copy of the batch.

        The copy is needed because the network may modify its input. Gradients are
        enabled, because the network may use gradients internally.
        """
        with torch.enable_grad():
            return self.call(copied(x))

    def forward(self, x: object) -> Tensor:
        """Return the outputs (b, c) of a batch, in a graph if gradients are enabled."""
        outputs = self._columns(x)
        return outputs if torch.is_grad_enabled() else outputs.detach()

    def _columns(self, x: object) -> Tensor:
        """Return the outputs (b, c), computed with gradients enabled.

        Logits are read from the logit layer if there is one. Maps of another shape than
        in ``fit`` raise an error.
        """
        if self.logit_layer is None:
            outputs = OUTPUT_MAPS[self.output_map](first_tensor(self.returned(x)))
        else:
            with recorded_outputs(self.module, [self.logit_layer]) as recorded:
                raw = first_tensor(self.returned(x))
            calls = recorded.get(self.logit_layer, [])
            outputs = read_logits(raw, calls, self.probability_map)
        shape, expected = tuple(outputs.shape[1:]), self.shape
        # the length of a vector does not depend on the size of the inputs
        is_map = expected is not None and max(len(shape), len(expected)) > 1
        if is_map and shape != expected:
            raise ValueError(
                f"The network returns maps of shape {shape} for these rows, but "
                f"returned {expected} in fit. Pass inputs of equal size."
            )
        return as_columns(at_least_single(outputs))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Enter evaluation mode without parameter gradients; always restore the state.

        Only one thread at a time may enter this mode, in which inference mode and
        autocast are disabled. Results are therefore independent of other threads and of
        the caller's contexts.
        """
        # entered below, after the lock
        limited, without_inference = self.limit(), torch.inference_mode(False)
        with _EVALUATION, limited, without_inference, ExitStack() as stack:
            modules = list(self.module.modules())
            parameters = list(self.module.parameters())
            for device in {"cpu", *(p.device.type for p in parameters)}:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            # owner, name and value of each attribute that may change meanwhile
            before: list[Any] = list(computed_tensors(modules))
            before += [(owner, "training", owner.training) for owner in modules]
            before += [(p, "requires_grad", p.requires_grad) for p in parameters]
            # gradients scaled by frequencies in a batch are not true derivatives
            scaled = [m for m in modules if getattr(m, "scale_grad_by_freq", False)]
            before += [(owner, "scale_grad_by_freq", True) for owner in scaled]
            try:
                for owner in scaled:
                    vars(owner)["scale_grad_by_freq"] = False
                # eval is slow, because it sets an attribute of every module
                if any(owner.training for owner in modules):
                    self.module.eval()
                for parameter in parameters:
                    parameter.requires_grad = False
                yield
            finally:
                # the last change is undone first
                for owner, name, value in reversed(before):
                    # only what has changed, because setting attributes is slow
                    if getattr(owner, name, None) is not value:
                        setattr(owner, name, value)


def computed_tensors(
    modules: Iterable[nn.Module],
) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield module, name and value of tensors that are not parameters or buffers.

    For example, a ``weight_norm`` hook computes such a tensor in each forward pass.
    """
    for owner in modules:
        for name, value in vars(owner).items():
            if isinstance(value, Tensor):
                yield owner, name, value


@contextmanager
def recorded_outputs(
    module: nn.Module,
    names: Iterable[str],
    kept: Callable[[Any], Any] = lambda out: out,
) -> Iterator[dict[str, list[Any]]]:
    """Record the outputs of submodules while the context is active.

    The context yields a dict. It maps the name of each submodule that has been called
    to a list, with ``kept(output)`` of each call. Submodules are in the order of their
    first call.
    """
    recorded: dict[str, list[Any]] = {}

    # torch calls a hook with the module, its inputs and its output; hooks that return
    # None leave the output unchanged
    def hook(name: str) -> Callable[..., None]:
        return lambda _m, _i, out: recorded.setdefault(name, []).append(kept(out))

    with ExitStack() as stack:
        for name in names:
            layer = module.get_submodule(name)
            stack.enter_context(layer.register_forward_hook(hook(name)))
        yield recorded


def with_attributes(net: NeuralNet, **attributes: object) -> NeuralNet:
    """Return a copy of a skorch net that shares all but the given attributes."""
    bare = object.__new__(type(net))
    vars(bare).update(vars(net), **attributes)
    return bare


def apply_in_own_dtype(forward: Forward, x: object) -> object:
    """Apply a network to a batch, cast to bfloat16 if the network needs it.

    Batches have float32 inputs, because numpy has no bfloat16. If a network in bfloat16
    refuses ``x``, its module gets a hook that casts inputs. The module keeps the hook,
    also in copies and files.
    """
    try:
        return forward.returned(x)
    except (RuntimeError, ValueError):
        if all(p.dtype != torch.bfloat16 for p in forward.module.parameters()):
            raise
        forward.module.register_forward_pre_hook(_in_bfloat16, with_kwargs=True)
        return forward.returned(x)


def _in_bfloat16(_module: nn.Module, args: object, kwargs: object) -> Any:
    """Cast the real-valued arguments of a module to bfloat16; a hook."""

    def cast(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.bfloat16() if is_float else leaf

    return mapped(cast, args), mapped(cast, kwargs)


def at_least_single(values: Tensor) -> Tensor:
    """Convert less precise values to float32, for instance after autocast."""
    is_short = values.is_floating_point() and values.element_size() < 4
    return values.float() if is_short else values


def rounding(values: Iterable[object]) -> float:
    """Return the relative rounding error of the least precise tensor.

    The dtypes of layer outputs show how precisely a network computes.
    """
    dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
    return max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0)


def as_columns(outputs: Tensor) -> Tensor:
    """Reshape outputs to (b, c), and order outputs of maps by position."""
    if outputs.ndim > 2:
        return outputs.movedim(1, -1).flatten(1)
    return outputs.unsqueeze(-1) if outputs.ndim == 1 else outputs


def first_tensor(outputs: Any) -> Tensor:
    """Return the output used for predictions.

    For a tuple, return the first element, as in skorch. For a mapping or an object,
    such as an output of ``transformers``, return its tensor ``logits`` if it has one.
    """
    if isinstance(outputs, tuple):
        return outputs[0]
    is_mapping = isinstance(outputs, Mapping)
    logits = outputs.get("logits") if is_mapping else getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) else outputs


@contextmanager
def requiring_grad(leaves: Iterable[nn.Parameter]) -> Iterator[None]:
    """Temporarily enable gradients for parameters of a frozen network."""
    leaves = list(leaves)
    for leaf in leaves:
        leaf.requires_grad_()
    try:
        yield
    finally:
        for leaf in leaves:
            leaf.requires_grad_(False)

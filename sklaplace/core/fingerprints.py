"""Fingerprints: keys made of content, equal exactly where results are.

A key is the hash of all that a result depends on. ``fingerprint`` walks a value as
a graph and hashes each node from its own content and the hashes of its parts, so
that equal content gives equal keys, whatever is shared, interned or moved to another
process. A false miss costs time, a false hit would be wrong: what cannot be told
raises.
"""

import copyreg
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import scipy
import scipy.sparse
import scipy.special
import torch
from skorch import NeuralNet
from skorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from sklaplace.core import definitions
from sklaplace.core.definitions import Node, attributes, hashed, library_release


# ---------------------------------------------------------------- plain values
def _plain(value: Any) -> Node:
    return Node(f"{type(value).__name__} {value!r}")


def _sequence(value: list[Any] | tuple[Any, ...]) -> Node:
    kind = type(value).__name__
    if set(map(type, value)) <= _BRIEF:
        return Node(f"{kind} {list(value)!r}")
    return Node(kind, enumerate(value))


def _mapping(value: Mapping[Any, Any]) -> Node:
    return Node(type(value).__name__, [("keys()", tuple(value)), *value.items()])


def _set(value: set[Any] | frozenset[Any]) -> Node:
    return Node(type(value).__name__, ((v, v) for v in value), ordered=False)


def _reduced(value: Any) -> Node:
    """Any object, by what pickle would keep of it."""
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    if isinstance(reduced, str):
        release = library_release(value, reduced)
        if release is None:
            raise TypeError("pickle knows it by its name only")
        return Node(f"global {value.__module__}.{reduced} {release}")
    make, args, state, items, pairs, setter = (*reduced, *[None] * 4)[:6]
    is_record = type(state) is dict and all(type(key) is str for key in state)
    found = state if is_record else {"state()": state}
    contents = {"items()": list(items or ()), "pairs()": list(pairs or ())}
    how = {"()": make, "args()": args, "setter()": setter}
    return attributes("object", {**found, **contents, **how})


# ---------------------------------------------------------- arrays and networks
def _array(value: np.ndarray[Any, Any]) -> Node:
    if type(value) not in (np.ndarray, np.memmap):
        base = {"base()": value.view(np.ndarray), "class()": type(value)}
        return attributes("array", {**base, **vars(value)})
    tag = f"array {value.dtype!r} {value.shape}"
    if value.dtype.hasobject or value.dtype.kind == "T":
        return Node(tag, enumerate(value.ravel().tolist()))
    flat = np.ascontiguousarray(value).reshape(-1)
    return Node(tag, data=flat.view(np.uint8) if flat.nbytes else b"")


def _scalar(value: np.generic) -> Node:
    return Node("scalar", [("array", np.asarray(value)), ("class", type(value))])


def _sparse(value: Any) -> Node:
    known = {k: v for k, v in vars(value).items() if not k.startswith("_has_")}
    return attributes("sparse", {**known, "class()": type(value)})


def _ufunc(value: np.ufunc) -> Node:
    for home in (np, scipy.special):
        if getattr(home, value.__name__, None) is value:
            return Node(f"ufunc {home.__name__}.{value.__name__}")
    raise TypeError("its code is not at hand")


def _random_state(value: Any) -> Node:
    bits = getattr(value, "_bit_generator", None) or value.bit_generator
    return Node("random state", [("state", bits.state), ("class", type(value))])


def _tensor(value: Tensor) -> Node:
    tag = f"{value.dtype} {value.device.type} {value.layout} {value.requires_grad}"
    hooks = list((value._backward_hooks or {}).values())
    parts = {"class()": type(value), "hooks()": hooks, **vars(value)}
    if is_lazy(value):
        return attributes(f"lazy {tag}", parts)
    tag = f"{tag} {tuple(value.shape)}"
    value = value.detach()
    if value.layout != torch.strided:
        value = value.to_sparse_coo().coalesce()
        parts |= {"indices()": value.indices(), "values()": value.values()}
        return attributes(tag, parts)
    if value.device.type == "meta":
        return attributes(tag, parts)
    flat = value.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return attributes(tag, parts)._replace(data=data)


_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)


def _module(value: nn.Module) -> Node:
    state = dict(vars(value))
    if type(value).__name__ == "OptimizedModule":  # torch.compile
        return Node("compiled", [("_orig_mod", state["_modules"]["_orig_mod"])])
    state.pop("_compiled_call_impl", None)
    hooks = {name: state.pop(name) for name in _HOOKS if name in state}
    # one counter per process numbers all hooks, so that only their order counts
    numbers = sorted({number for table in hooks.values() for number in table})
    for name, table in hooks.items():
        if table:
            state[name] = {numbers.index(n): hook for n, hook in table.items()}
    state |= {"class()": type(value), "memory()": _shared_memory(value)}
    return attributes("module", state)


def _shared_memory(module: nn.Module) -> list[str]:
    """Which weights are one and the same, and so are trained as one."""
    found: dict[int, int] = {}
    rows = []
    for name, part in module.named_modules():
        rows.append(name)
        for t in (*part._parameters.values(), *part._buffers.values()):
            if t is None or is_lazy(t) or t.layout != torch.strided:
                continue
            place = t.untyped_storage().data_ptr() or id(t)
            rows.append(f"{found.setdefault(place, len(found))} {t.storage_offset()}")
    return rows


def _net(value: Any) -> Node:
    """A skorch net: its parameters, and its state if it has any."""
    if not getattr(value, "initialized_", False):
        state = value.get_params(deep=False)
    else:
        state = {k: v for k, v in vars(value).items() if k != "callbacks_"}
        for name in value._optimizers:
            state[f"{name}_"] = state[f"{name}_"].state_dict()
        pairs = [pair for row in value.history for pair in row.items()]
        kept = [pair for pair in pairs if pair[0] not in ("batches", "dur")]
        state["history_"] = [word for pair in kept for word in pair]
    state.pop("_params_to_validate", None)
    return attributes("net", {**state, "class()": type(value)})


def _callback(value: Any) -> Node:
    """A skorch callback by its parameters: the rest does not survive a clone."""
    params = value.get_params(deep=False)
    return attributes("callback", {**params, "class()": type(value)})


# ------------------------------------------------------------------- the walk
_BRIEF = {type(None), bool, int, float, str}  # also a list of them has an exact repr
_PLAIN = {
    *(*_BRIEF, complex, type(...), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
_EXACT: dict[type, Callable[[Any], Node]] = {
    **definitions.EXACT,
    **dict.fromkeys(_PLAIN, _plain),
    **dict.fromkeys((list, tuple), _sequence),
    **dict.fromkeys((dict, types.MappingProxyType), _mapping),
    **dict.fromkeys((set, frozenset), _set),
    bytes: lambda value: Node("bytes", data=value),
    RemovableHandle: lambda _: Node("handle of a hook"),
    weakref.ref: lambda value: Node("weakref", [("()", value())]),
}
_KINDS: tuple[tuple[Any, Callable[[Any], Node]], ...] = (
    *definitions.KINDS,
    (Tensor, _tensor),
    (np.ndarray, _array),
    (np.generic, _scalar),
    (np.dtype, lambda value: Node(f"dtype {value!r}")),
    (np.ufunc, _ufunc),
    ((scipy.sparse.spmatrix, scipy.sparse.sparray), _sparse),
    (nn.Module, _module),
    (NeuralNet, _net),
    (Callback, _callback),
    ((np.random.RandomState, np.random.Generator), _random_state),
    (torch.Generator, lambda g: Node(f"generator {g.device}", [(0, g.get_state())])),
    (object, _reduced),
)


def _describe(value: Any) -> Node:
    """The node of any value."""
    exact = _EXACT.get(type(value))
    if exact:
        return exact(value)
    return next(make for kinds, make in _KINDS if isinstance(value, kinds))(value)


@dataclass(slots=True)
class _Frame:
    """A node whose parts are being hashed."""

    value: Any
    node: Node
    key: Any
    parts: Iterator[tuple[Any, Any]]
    position: int
    low: int
    digests: list[bytes] = field(default_factory=list)


class _Walk:
    """Hashes a graph, with a stack of its own and in linear time.

    What has been hashed is not hashed again, unless it is part of a cycle that is
    still open: then its position stands for it. Tarjan (1972), "Depth-first search
    and linear graph algorithms", tells the two apart. So what is shared does not
    count, but for the parts of one cycle.
    """

    def __init__(self) -> None:
        self.named: dict[str, dict[int, Any]] = {}
        self.digests: dict[str, bytes] = {}
        self._done: dict[int, tuple[bytes, Any]] = {}  # values too: ids stay theirs
        self._open: list[Any] = []
        self._position: dict[int, int] = {}
        self._frames: list[_Frame] = []

    def digest(self, root: Any) -> bytes:
        """Hash of a value and everything in it."""
        digest = self._enter(None, root)
        while self._frames:
            frame = self._frames[-1]
            if digest is not None:
                frame.digests.append(digest)
            step = next(frame.parts, None)
            digest = self._leave() if step is None else self._enter(*step)
        return cast(bytes, digest)

    def _enter(self, key: Any, value: Any) -> bytes | None:
        """Hash of a value that can be told at once; for others, None and a frame."""
        if type(value) in _PLAIN:
            return b"=" + _plain(value).tag.encode("utf-8", "surrogatepass")
        if id(value) in self._done:
            return self._done[id(value)][0]
        position = self._position.get(id(value))
        if position is not None:
            self._frames[-1].low = min(self._frames[-1].low, position)
            return b"@%d" % (len(self._open) - position)
        try:
            node = _describe(value)
        except Exception as error:
            raise TypeError(_refusal(self._frames, key, value, error)) from error
        position = self._position[id(value)] = len(self._open)
        self._open.append(value)
        parts = iter(node.parts)
        self._frames.append(_Frame(value, node, key, parts, position, position))
        return None

    def _leave(self) -> bytes:
        """Hash of the innermost frame, whose parts are all known."""
        frame = self._frames.pop()
        node, digests = frame.node, frame.digests
        tag = node.tag.encode("utf-8", "surrogatepass")
        parts = digests if node.ordered else sorted(digests)
        digest = hashed([tag, *parts], node.data)
        if node.name:
            self.named.setdefault(node.name, {})[id(frame.value)] = frame.value
            self.digests[node.name] = digest
        if frame.low < frame.position:  # part of a cycle that is still open
            self._frames[-1].low = min(self._frames[-1].low, frame.low)
            return digest
        for value in self._open[frame.position :]:
            del self._position[id(value)]
        del self._open[frame.position :]
        self._done[id(frame.value)] = digest, frame.value
        return digest


def _refusal(frames: list[_Frame], key: Any, value: Any, error: Exception) -> str:
    """Where something is that cannot be told, and why."""
    keys = [*(frame.key for frame in frames[1:]), key]
    labels = [frame.node.label for frame in frames]
    path = "".join(label.format(k) for label, k in zip(labels, keys, strict=False))
    is_named = path.startswith("['")  # in a dict that holds all there is
    path = path[2:].replace("']", "", 1) if is_named else f"value{path}"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return (
        f"{path} is of type {kind}, whose content cannot be told: {error}. So nothing "
        "can be cached by it. Leave it out, give its class a __reduce__ method, or use "
        "memory=None."
    )


class Fingerprint(str):
    """A key, with the functions and classes of the user's that went into it.

    Attributes
    ----------
    objects : dict of lists
        By name. A cached result refers to them by name and gets those of the
        process that reads it, so that they need not be importable.
    digests : dict of bytes
        What they counted by; the parts of a definition come before it.
    """

    objects: dict[str, list[Any]]
    digests: dict[str, bytes]


def fingerprint(value: Any) -> Fingerprint:
    """Hash of the content of a value, the same in any process.

    Parameters
    ----------
    value : object
        Arrays, tensors, modules, skorch nets, datasets, functions, classes, and
        containers of them. Best a dict of all that matters: an error names what it
        is about by the keys.

    Returns
    -------
    str
        Hexadecimal. The versions of the libraries, and torch's default dtype,
        device and precision, are part of it.

    Raises
    ------
    TypeError
        If the content of something in it cannot be told, such as an open file.

    Notes
    -----
    Costs a SHA-256 of all arrays (about 0.6 ms per MB) and about 10 µs per object.
    What is neither in the value nor in the code that it refers to does not count:
    files that a dataset reads, environment variables, patches to a library.
    """
    walk = _Walk()
    torch_defaults = (
        torch.get_default_dtype(),
        torch.get_default_device().type,
        torch.get_float32_matmul_precision(),
    )
    world = definitions.PYTHON, definitions.LIBRARIES, *torch_defaults
    key = Fingerprint(hashed([walk.digest(value), repr(world).encode()]).hex())
    key.objects = {name: list(found.values()) for name, found in walk.named.items()}
    key.digests = walk.digests
    return key

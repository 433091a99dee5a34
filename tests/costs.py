"""Costs of an operation, counted instead of timed, so equal on every machine.

The counts cover passes through a network, columns of backward passes, decompositions
and the bytes of tensors. The counter intercepts the operations of torch itself.
"""

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from simulated_device import unwrapped
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# names of operators, which differ between releases of torch
EIGH = re.compile("_?(linalg_)?(eigh?|svd)")
CHOLESKY = re.compile("_?(linalg_)?(cholesky|ldl_factor|lu_factor|inv|solve)(_ex)?")


@dataclass
class Costs:
    """The counts."""

    # rows of each pass through the network
    forward: list[int] = field(default_factory=list)
    # rows and columns of each pass back from outputs (b, c); of scalars, one row
    backward: list[tuple[int, int]] = field(default_factory=list)
    # sizes of matrices that were diagonalised, and factorised otherwise
    eigh: list[int] = field(default_factory=list)
    cholesky: list[int] = field(default_factory=list)
    # bytes written: of tensors that were made, and each time that one was changed
    written: int = 0
    # bytes of tensors made since the start: now, and at most at any time
    alive: int = 0
    peak: int = 0
    largest: int = 0  # elements of the largest tensor made

    def forward_rows(self, more_than: int = 0) -> list[int]:
        """Return the rows of each pass with more than the given number of rows."""
        return [rows for rows in self.forward if rows > more_than]

    def columns(self, more_than: int = 0) -> int:
        """Return rows times columns of backward passes over more rows than given."""
        return sum(rows * k for rows, k in self.backward if rows > more_than)


class _Watch(TorchDispatchMode):
    """Mode that sees every operation, also in backward passes and below ``vmap``.

    A storage counts once, until it is freed. Earlier storages do not count.
    """

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.costs = costs
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            self._note(tensor, is_new=False)
        name = func._schema.name.removeprefix("aten::")
        for kind, sizes in (
            (EIGH, self.costs.eigh),
            (CHOLESKY, self.costs.cholesky),
        ):
            if kind.fullmatch(name):
                n = args[0].shape[-1]
                sizes += [n] * (args[0].numel() // max(1, n * args[0].shape[-2]))
        found = func(*args, **kwargs)
        for tensor in tree_leaves(found):
            self._note(tensor, is_new=True)
        if func._schema.is_mutable and isinstance(found, Tensor):
            self.costs.written += found.numel() * found.element_size()
        return found

    def _note(self, tensor: Any, *, is_new: bool) -> None:
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        n_bytes = storage.nbytes() if is_new else 0
        self._known[key] = weakref.finalize(storage, self._forget, key, n_bytes)
        self.costs.written += n_bytes
        self.costs.alive += n_bytes
        self.costs.peak = max(self.costs.peak, self.costs.alive)
        if is_new:
            self.costs.largest = max(self.costs.largest, tensor.numel())

    def _forget(self, key: int, n_bytes: int) -> None:
        self.costs.alive -= n_bytes
        self._known.pop(key, None)

    def stop(self) -> None:
        """Release the storages that are still alive."""
        for known in self._known.values():
            known.detach()


def _rows_and_columns(outputs: Any, cotangents: Any) -> tuple[int, int]:
    """Return the numbers of rows and columns of a backward pass."""
    f = outputs if isinstance(outputs, Tensor) else outputs[0]
    if cotangents is None:
        return 1, 1
    v = cotangents if isinstance(cotangents, Tensor) else cotangents[0]
    rows = len(f) if f.ndim > 1 else 1
    return rows, unwrapped(v).numel() // max(1, unwrapped(f).numel())


@contextmanager
def passes(network: type[nn.Module] | None) -> Iterator[list[int]]:
    """Record the rows of each pass through a class of networks."""
    rows: list[int] = []

    def note(module: nn.Module, args: Any, _output: Any) -> None:
        if type(module) is network:
            rows.append(len(args[0]))

    with nn.modules.module.register_module_forward_hook(note):
        yield rows


@contextmanager
def counted(network: type[nn.Module] | None = None) -> Iterator[Costs]:
    """Count the operations inside; ``network`` is the class of the whole network."""
    costs = Costs()
    grad = torch.autograd.grad

    def note_columns(outputs: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        cotangents = args[0] if args else options.get("grad_outputs")
        costs.backward.append(_rows_and_columns(outputs, cotangents))
        return grad(outputs, inputs, *args, **options)

    watch = _Watch(costs)
    try:
        with (
            passes(network) as costs.forward,
            mock.patch.object(torch.autograd, "grad", note_columns),
            watch,
        ):
            yield costs
    finally:
        watch.stop()


@contextmanager
def calls(owner: Any, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """Record the arguments of every call of a function or method inside."""
    original: Callable[..., Any] = getattr(owner, name)
    found: list[tuple[Any, ...]] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        found.append(args)
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, noted):
        yield found

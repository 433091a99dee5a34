"""A simulated GPU: mistakes with devices are found on machines that have none.

Inside of `simulated_gpu`, ``device="cuda"`` works everywhere. Data stays in the memory
of the CPU, so that results are those of the CPU; the storage of each tensor is labelled
with the device that it would be on. Every call of a function of torch is checked by the
rules of torch:

* all tensors of a call are on one device, except that numbers on the CPU, tensors of no
  dimension, may be among tensors on the GPU;
* a tensor on the GPU may be indexed by a tensor on the CPU, not the other way round;
* random numbers come from a generator of the device that they are made on;
* a tensor on the GPU has no ``numpy()``.

A violation raises `DeviceError`, and is noted in the list that the context yields, as
the error might be caught. Not simulated: what C++ code of torch does by itself, whose
results take part in any call; kernels of the GPU, streams, several GPUs, other threads.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# that take no numbers, and whose arguments may be on two devices
WITHOUT_NUMBERS = {"cat", "stack", "add_", "mul_", "sub_", "div_"}
FREE = {"copy_", "type_as", "_has_compatible_shallow_copy_type"}
INDEXING = {"__getitem__", "__setitem__", "index_put", "index_put_"}
_Plain = torch.Generator


class DeviceError(RuntimeError):
    """A violation of the rules above."""


class _Generator(torch.Generator):
    """A generator that says which device it is for."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        made = super().__new__(cls, "cpu")
        made.label = _device(device)
        return made

    @property
    def device(self) -> torch.device:
        return self.label


def _device(device: Any) -> torch.device:
    """One of the two devices."""
    return CPU if torch.device(device).type == "cpu" else GPU


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor that ``torch.func`` has wrapped, or the tensor itself."""
    if hasattr(torch.func, "debug_unwrap"):
        return torch.func.debug_unwrap(tensor)
    functorch = torch._C._functorch  # of older releases
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _storage(tensor: Tensor) -> Any:
    """Storage of a tensor, also of one that ``torch.func`` has wrapped; or None."""
    if tensor.layout != torch.strided:
        return None
    return _unwrapped(tensor).untyped_storage()


def label(tensor: Tensor) -> torch.device | None:
    """Device of a tensor, None as long as it is undecided."""
    return getattr(_storage(tensor), "label", None)


def _labelled(found: Any, device: torch.device | None, *, again: bool = False) -> Any:
    """Label tensors that have no device yet, or all that were just made."""
    for tensor in tree_leaves(found):
        if isinstance(tensor, Tensor) and device is not None:
            storage = _storage(tensor)
            if storage is not None and (again or not hasattr(storage, "label")):
                storage.label = device
    return found


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; a copy if it is on another."""
    if (label(tensor) or CPU) == device:
        return _labelled(tensor, device)
    return _labelled(tensor.clone(), device, again=True)


class Simulation(TorchFunctionMode):
    """Checks and labels every call of a function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.violations: list[str] = []

    def refuse(self, message: str) -> None:
        """Note a violation and raise it."""
        self.violations.append(message)
        raise DeviceError(message)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        handlers = {
            **dict.fromkeys(("__get__", "__set__"), self._attribute),
            **dict.fromkeys(("to", "cpu", "cuda"), self._to),
            **dict.fromkeys(("numpy", "__array__"), self._numpy),
            "get_device": lambda *_: -1 if (label(args[0]) or CPU) == CPU else 0,
            "__deepcopy__": self._copy,
            "grad": self._gradients,
        }
        return handlers.get(name, self._call)(func, name, args, dict(kwargs or {}))

    def _call(self, func, name, args, kwargs):
        given = kwargs.pop("device", None)
        device = self._common(name, args, kwargs)
        device = device if given is None else _device(given)
        for value in (*args, *kwargs.values()):
            if isinstance(value, _Plain) and value.device != (device or CPU):
                self.refuse(f"{name} on {device}, a generator on {value.device}")
        found = func(*args, **kwargs)
        if given is not None and any(found is value for value in args):
            return moved(found, device)
        return _labelled(found, device)

    def _copy(self, func, _name, args, kwargs):
        return _labelled(func(*args, **kwargs), label(args[0]))

    def _gradients(self, func, _name, args, kwargs):
        """On the devices of what outputs are derived by."""
        found = func(*args, **kwargs)
        leaves = [args[1]] if isinstance(args[1], Tensor) else args[1]
        for gradient, leaf in zip(found, leaves, strict=True):
            is_edge = not isinstance(leaf, Tensor)  # of the graph of outputs
            _labelled(gradient, label(tree_leaves(args[0])[0] if is_edge else leaf))
        return found

    def _numpy(self, func, _name, args, kwargs):
        if label(args[0]) == GPU and not kwargs.get("force"):
            self.refuse("numpy() of a tensor on the GPU: call cpu() first")
        return func(*args, **kwargs)

    def _attribute(self, func, _name, args, _kwargs):
        name = getattr(func.__self__, "__name__", "")
        if name in ("device", "is_cuda", "is_cpu"):
            device = label(args[0]) or CPU
            return device if name == "device" else f"is_{device.type}" == name
        return _labelled(func(*args), label(args[0]))

    def _to(self, func, name, args, kwargs):
        own, *options = args
        if name != "to":
            return moved(own, CPU if name == "cpu" else GPU)
        device, kept = kwargs.pop("device", None), {}
        for value in (*options, kwargs.pop("other", None)):
            if isinstance(value, Tensor):
                device, kept["dtype"] = label(value), value.dtype
            elif isinstance(value, torch.dtype):
                kept["dtype"] = value
            elif isinstance(value, (str, int, torch.device)) and value not in (0, 1):
                device = value
        kwargs.pop("non_blocking", None)
        found = func(own, **kept, **kwargs) if kept or kwargs else own
        device = (label(own) or CPU) if device is None else _device(device)
        return moved(_labelled(found, label(own)), device)

    def _common(self, name, args, kwargs) -> torch.device | None:
        """Device of all tensors of a call."""
        tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        if not tensors:
            return CPU
        labels = [label(tensor) for tensor in tensors]
        device = GPU if GPU in labels else CPU if CPU in labels else None
        if name in FREE:
            return labels[0]
        if name in INDEXING and labels[0] == CPU and device == GPU:
            self.refuse(f"{name}: a tensor on the CPU indexed by one on the GPU")
        for tensor, other in zip(tensors, labels, strict=True):
            is_written = tensor is tensors[0] and name in WITHOUT_NUMBERS
            is_number = tensor.ndim == 0 and name not in ("cat", "stack")
            is_free = (is_number and not is_written) or name in INDEXING
            if other is None:
                _labelled(tensor, device)
            elif other != device and not is_free:
                shapes = [tuple(t.shape) for t in tensors]
                self.refuse(f"{name} of tensors on {labels}, of shapes {shapes}")
        return device


# what the package, skorch and torch ask about the GPU
_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "is_current_stream_capturing": lambda: False,
    "init": lambda: None,
    "mem_get_info": lambda device=None: (8 * 2**30, 16 * 2**30),
    "manual_seed_all": lambda seed: None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "get_rng_state_all": list,
    "set_rng_state": lambda state, device=None: None,
    "synchronize": lambda device=None: None,
}


@contextlib.contextmanager
def simulated_gpu() -> Iterator[list[str]]:
    """Context in which there is a GPU, yielding the violations so far."""
    simulation = Simulation()
    with contextlib.ExitStack() as stack:
        for name, value in _CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        # whose streams optimisers ask for, also of a build that finds no GPU
        name = "current_accelerator"
        none = mock.patch.object(torch.accelerator, name, return_value=None)
        stack.enter_context(none)
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(simulation)
        yield simulation.violations

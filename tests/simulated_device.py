"""A simulated GPU, to find device errors on machines without a GPU.

Inside `simulated_gpu`, ``device="cuda"`` works everywhere. Data stays in CPU memory, so
the results are CPU results. The storage of each tensor is labelled with the device it
would be on. The simulation checks every call of a torch function by torch's rules:

* all tensors of a call are on one device, but CPU tensors without dimensions may be
  combined with GPU tensors;
* a CPU tensor may index a GPU tensor, but a GPU tensor may not index a CPU tensor;
* random numbers come from a generator of their own device;
* a tensor on the GPU has no ``numpy()``.

A violation raises `DeviceError`. The context yields a list of all violations, because
the error might be caught. The simulation does not cover operations inside torch's C++
code, whose results may enter any call. GPU kernels, streams, several GPUs and other
threads are not simulated either.
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
    """A generator that reports its device."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        made = super().__new__(cls, "cpu")
        made.label = _device(device)
        return made

    @property
    def device(self) -> torch.device:
        return self.label


def _device(device: Any) -> torch.device:
    """Return one of the two devices."""
    return CPU if torch.device(device).type == "cpu" else GPU


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor that ``torch.func`` has wrapped, or the tensor itself."""
    if hasattr(torch.func, "debug_unwrap"):
        return torch.func.debug_unwrap(tensor)
    functorch = torch._C._functorch  # of older releases
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _storage(tensor: Tensor) -> Any:
    """Return the storage of a tensor, possibly wrapped by ``torch.func``, or None."""
    if tensor.layout != torch.strided:
        return None
    return unwrapped(tensor).untyped_storage()


def label(tensor: Tensor) -> torch.device | None:
    """Return the device of a tensor, or None if it is undecided."""
    return getattr(_storage(tensor), "label", None)


def _labelled(found: Any, device: torch.device | None, *, again: bool = False) -> Any:
    """Label tensors without a device, or all newly made tensors."""
    for tensor in tree_leaves(found):
        if isinstance(tensor, Tensor) and device is not None:
            storage = _storage(tensor)
            if storage is not None and (again or not hasattr(storage, "label")):
                storage.label = device
    return found


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device, copied if necessary."""
    if (label(tensor) or CPU) == device:
        return _labelled(tensor, device)
    return _labelled(tensor.clone(), device, again=True)


class Simulation(TorchFunctionMode):
    """Mode that checks and labels every call of a torch function."""

    def __init__(self) -> None:
        super().__init__()
        self.violations: list[str] = []

    def refuse(self, message: str) -> None:
        """Record a violation and raise it."""
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
        """Label each gradient with the device of its input."""
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
        """Return the common device of all tensors of a call."""
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
    """Simulate a GPU in this context, and yield the violations so far."""
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

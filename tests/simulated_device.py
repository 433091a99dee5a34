"""A simulated GPU: mistakes with devices are found on machines that have none.

Inside of `simulated_gpu`, ``device="cuda"`` works everywhere. Data stays in the memory
of the CPU, so that results are those of the CPU; each storage is labelled with the
device that it would be on. Every operation is checked by the rules of torch:

* all tensors of an operation are on one device, except that tensors of no dimension on
  the CPU may take part in elementwise operations;
* a tensor on the GPU may be indexed by a tensor on the CPU, not the other way round;
* random numbers come from a generator of the device that they are made on;
* a tensor on the GPU has no ``numpy()``.

A violation raises `DeviceError`, and is noted in the list that the context yields, as
the error might be caught. Labels belong to storages: views, saved tensors of autograd
and tensors inside of ``torch.func`` need no care. Pickles, ``torch.save`` and copies
keep labels. Not simulated: kernels of the GPU themselves, their rounding and their
memory, streams, several GPUs, and other threads, whose operations are not checked.

What C++ code of torch makes by itself, such as the zeros of ``one_hot``, would be on
the right device: it takes that of the first tensor that it meets.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# take numbers as tensors of no dimension, without being elementwise to torch
_WITH_NUMBERS = re.compile("aten::((masked_|index_)?fill_?|where)")
_NEW = "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"
_ALIASING = torch.as_tensor, torch.asarray
_ORIGINAL = {
    name: getattr(Tensor, name)
    for name in ("to", "numpy", "__array__", "__deepcopy__", *_NEW)
}


class DeviceError(RuntimeError):
    """A violation of the rules above."""


class _Labels:
    """Devices of storages: None as long as undecided, the CPU if without a label."""

    def __init__(self) -> None:
        # a storage whose address is kept by a weak reference has it for itself
        self._known: dict[int, tuple[StorageWeakRef, torch.device | None]] = {}
        self._limit = 1000

    def of(self, tensor: Tensor) -> torch.device | None:
        """Device of a tensor."""
        storage = _storage(tensor)
        return CPU if storage is None else self.of_storage(storage)

    def of_storage(self, storage: Any) -> torch.device | None:
        """Device of a storage."""
        entry = self._known.get(storage._cdata)
        return CPU if entry is None else entry[1]

    def set(self, storage: Any, device: torch.device | None) -> None:
        """Label a storage that is nobody else's."""
        self._known.pop(storage._cdata, None)
        if device == CPU:
            return
        self._known[storage._cdata] = StorageWeakRef(storage), device
        if len(self._known) > self._limit:
            known = self._known.items()
            self._known = {key: v for key, v in known if not v[0].expired()}
            self._limit = 1000 + 2 * len(self._known)


class Simulation(TorchDispatchMode):
    """Checks and labels every operation of a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.violations: list[str] = []
        self.labels = _Labels()
        self._is_composite: dict[Any, bool] = {}
        self._n_calls = 0  # of `making` that are under way

    # ------------------------------------------------------------------- operations
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._consists_of_others(func):
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if func._schema.name == "aten::set_":  # to a storage, which has its label
            return func(*args, **kwargs)
        device = self._common_device(func, args, kwargs)
        found = func(*args, **kwargs)
        if device != CPU:
            for tensor in tree_leaves(found):
                self._label(tensor, device)
        return found

    def _consists_of_others(self, func: Any) -> bool:
        """Whether it reaches the mode in one piece, as in inference mode alone."""
        if func not in self._is_composite:
            self._is_composite[func] = torch._C._dispatch_has_kernel_for_dispatch_key(
                func.name(), "CompositeImplicitAutograd"
            )
        return self._is_composite[func]

    def _common_device(self, func, args, kwargs) -> torch.device | None:
        """Device of the results; None if it is not decided yet."""
        name, given = func._schema.name, tree_leaves((args, kwargs))
        tensors = [value for value in given if isinstance(value, Tensor)]
        if not tensors:
            return CPU if self._n_calls else None
        if name == "aten::copy_":
            return self.labels.of(tensors[0])
        kinds = {str(entry.type) for entry in func._schema.arguments}
        indexes = "List[Optional[Tensor]]" in kinds
        if indexes:
            tensors = self._without_cpu_indices(func, args)
        devices = [self.labels.of(tensor) for tensor in tensors]
        device = GPU if GPU in devices else CPU if CPU in devices else None
        takes_numbers = indexes or "_foreach" in name
        takes_numbers |= _WITH_NUMBERS.fullmatch(name) is not None
        takes_numbers |= torch.Tag.pointwise in func.tags
        written = {id(t) for t in tree_leaves(_written(func, args, kwargs))}
        for tensor, other in zip(tensors, devices, strict=True):
            is_number = takes_numbers and tensor.ndim == 0 and id(tensor) not in written
            if other is None:
                self._label(tensor, device)
            elif other != device and not is_number:
                pairs = zip(tensors, devices, strict=True)
                shapes = ", ".join(f"{tuple(t.shape)} on {d}" for t, d in pairs)
                self.refuse(f"{func.name()} of tensors on two devices: {shapes}")
        return device

    def _without_cpu_indices(self, func, args) -> list[Tensor]:
        values, indices, *rest = args
        device = self.labels.of(values)
        indices = [i for i in indices if isinstance(i, Tensor)]
        if device == CPU and any(self.labels.of(i) == GPU for i in indices):
            self.refuse(f"{func.name()}: a tensor on the CPU indexed by one on the GPU")
        return [values, *(value for value in rest if isinstance(value, Tensor))]

    def check_generators(self, name: str, given: Any, device: torch.device) -> None:
        """Refuse a generator of another device than the numbers."""
        for value in given:
            if isinstance(value, torch._C.Generator) and value.device != device:
                self.refuse(f"{name} on {device}, a generator on {value.device}")

    def refuse(self, message: str) -> None:
        """Note a violation and raise it."""
        self.violations.append(message)
        raise DeviceError(message)

    # ----------------------------------------------------------------------- labels
    def device(self, tensor: Tensor) -> torch.device:
        """``Tensor.device``."""
        return self.labels.of(tensor) or CPU

    def _label(self, value: Any, device: torch.device | None) -> Any:
        """Label a tensor with data of its own."""
        if isinstance(value, Tensor) and (storage := _storage(value)) is not None:
            self.labels.set(storage, device)
        return value

    def moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor on a device; a copy if it is on the other. Differentiable."""
        source = self.device(tensor)
        if source == device:
            return tensor
        copy = self._label(tensor.clone(), device)
        if copy.requires_grad and not _is_wrapped(copy):
            copy.register_hook(lambda gradient: self.moved(gradient, source))
        return copy

    # ---------------------------------------------------------------------- patches
    def to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``Tensor.to``."""
        device, options = _parse_to(*args, **kwargs)
        device = self.device(tensor) if device is None else _device(device)
        if options:
            tensor = _ORIGINAL["to"](tensor, **options)
        return self.moved(tensor, device)

    def numpy(self, tensor: Tensor, *, force: bool = False) -> Any:
        """``Tensor.numpy``."""
        self._check_readable(tensor, force)
        return _ORIGINAL["numpy"](tensor, force=force)

    def array(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``Tensor.__array__``."""
        self._check_readable(tensor, False)
        return _ORIGINAL["__array__"](tensor, *args, **kwargs)

    def _check_readable(self, tensor: Tensor, force: bool) -> None:
        if self.labels.of(tensor) == GPU and not force:
            self.refuse("numpy() of a tensor on the GPU: call cpu() first")

    def deepcopy(self, tensor: Tensor, memo: Any) -> Tensor:
        """``Tensor.__deepcopy__``."""
        copy = _ORIGINAL["__deepcopy__"](tensor, memo)
        return self._label(copy, self.device(tensor))

    def making(self, function: Any) -> Any:
        """A function of torch that makes tensors and takes a device."""

        def made(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            if device is None:
                self.check_generators(function.__name__, kwargs.values(), CPU)
                return self._call(function, *args, **kwargs)
            device = _device(device)
            self.check_generators(function.__name__, kwargs.values(), device)
            found = self._call(function, *args, **kwargs)
            alias = function in _ALIASING
            return self.moved(found, device) if alias else self._label(found, device)

        return made

    def new(self, name: str) -> Any:
        """``Tensor.new_zeros`` and the like."""

        def made(tensor: Tensor, *args: Any, device: Any = None, **kwargs: Any) -> Any:
            device = self.device(tensor) if device is None else _device(device)
            found = self._call(_ORIGINAL[name], tensor, *args, **kwargs)
            return self._label(found, device)

        return made

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that makes tensors on the CPU."""
        self._n_calls += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._n_calls -= 1

    def tensor_patches(self) -> dict[str, Any]:
        """What to put in place of attributes of ``torch.Tensor``."""
        of = self.device
        return {
            "device": property(of),
            "is_cuda": property(lambda tensor: of(tensor) == GPU),
            "is_cpu": property(lambda tensor: of(tensor) == CPU),
            "get_device": lambda tensor: -1 if of(tensor) == CPU else 0,
            "to": lambda tensor, *args, **kwargs: self.to(tensor, *args, **kwargs),
            "cpu": lambda tensor, *_, **__: self.moved(tensor, CPU),
            "cuda": lambda tensor, *_, **__: self.moved(tensor, GPU),
            "type_as": lambda tensor, other: self.to(tensor, other),
            "numpy": lambda tensor, **options: self.numpy(tensor, **options),
            "__array__": lambda tensor, *args, **kw: self.array(tensor, *args, **kw),
            "__deepcopy__": lambda tensor, memo: self.deepcopy(tensor, memo),
            **{name: self.new(name) for name in _NEW},
        }

    def package(self) -> tuple[int, Any, Any]:
        """Labels in files of ``torch.save``, from which pickles are made as well."""

        def tag(storage: Any) -> str | None:
            plain = getattr(storage, "_untyped_storage", storage)
            return str(GPU) if self.labels.of_storage(plain) == GPU else None

        def restore(storage: Any, location: str) -> Any:
            if not location.startswith("cuda"):
                return None
            self.labels.set(getattr(storage, "_untyped_storage", storage), GPU)
            return storage

        return 0, tag, restore


class _Calls(TorchFunctionMode):
    """What is seen above the operations: generators, and functions of torch.

    Functions that make tensors may have been looked up before they were replaced.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.simulation = simulation
        self.made = {f: simulation.making(f) for f in _device_constructors()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor):
            device = self.simulation.device(args[0])
            given = [*args, *kwargs.values()]
            self.simulation.check_generators(func.__name__, given, device)
        return self.made.get(func, func)(*args, **kwargs)


class _Generator(torch.Generator):
    """A generator that says which device it is for."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        made = super().__new__(cls, "cpu")
        made._label = _device(device)
        return made

    @property
    def device(self) -> torch.device:
        return self._label


@contextlib.contextmanager
def simulated_gpu() -> Iterator[list[str]]:
    """Context in which there is a GPU, yielding the violations so far."""
    simulation = Simulation()
    registry = torch.serialization._package_registry
    with contextlib.ExitStack() as stack:
        for name, value in simulation.tensor_patches().items():
            stack.enter_context(mock.patch.object(Tensor, name, value))
        for name in dir(torch):
            function = getattr(torch, name)
            if any(function is known for known in _device_constructors()):
                made = simulation.making(function)
                stack.enter_context(mock.patch.object(torch, name, made))
        for name, value in _CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        # whose streams optimisers ask for, also of a build that finds no GPU
        no_streams = mock.patch.object(
            torch.accelerator, "current_accelerator", return_value=None
        )
        stack.enter_context(no_streams)
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        entry = [simulation.package(), *registry]
        stack.enter_context(
            mock.patch.object(torch.serialization, "_package_registry", entry)
        )
        stack.enter_context(_Calls(simulation))
        stack.enter_context(simulation)
        yield simulation.violations


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


def _device(device: Any) -> torch.device:
    """One of the two devices."""
    return CPU if torch.device(device).type == "cpu" else GPU


def _is_wrapped(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _storage(tensor: Tensor) -> Any:
    """Storage of a tensor, also of one that ``torch.func`` has wrapped; or None."""
    while _is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse
        return None


def _parse_to(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Device, and what is left of the arguments of ``Tensor.to``."""
    device, other = kwargs.pop("device", None), kwargs.pop("other", None)
    for value in args:
        if isinstance(value, torch.dtype):
            kwargs["dtype"] = value
        elif isinstance(value, (str, int, torch.device)) and value not in (True, False):
            device = value
        elif isinstance(value, Tensor):
            other = value
    if other is not None:
        device, kwargs["dtype"] = other.device, other.dtype
    kwargs.pop("non_blocking", None)
    return device, {k: v for k, v in kwargs.items() if v is not None}


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Arguments that an operation writes to."""
    schema = func._schema.arguments
    names = [
        a.name for a in schema if a.alias_info is not None and a.alias_info.is_write
    ]
    by_name = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    return [by_name[name] for name in names if name in by_name]

"""Memory budget: batch sizes, checks of free memory, and moves between devices."""

import copy
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sklaplace.core.memory import free_cpu_bytes

# Bytes for the work on one batch, without the network and the factors of the
# posterior.
BUDGET = 64 * 2**20
# Bytes for what is kept of samples from one pass to the next, where a pass can be
# repeated or left out: the same on all machines, as results may depend on it.
KEPT_BUDGET = 512 * 2**20
# Bytes that are taken to be free: looking takes longer than a prediction of one row.
SMALL = 2**20
# Bytes of a batch that fits the caches of a CPU.
CACHE = 32 * 2**20
# Batches of fewer samples cost much more time per sample.
FEW_ROWS = 8


def batch_rows(row_bytes: int) -> int:
    """Return the batch size for samples of so many bytes, at least one."""
    row_bytes = max(1, row_bytes)
    return max(1, min(max(FEW_ROWS, CACHE // row_bytes), BUDGET // row_bytes))


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated on a device; an estimate for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_cpu_bytes()


def require_bytes(
    needed: float, device: torch.device | str, subject: str, advice: str
) -> None:
    """Raise an error where memory would not suffice for more than ``SMALL`` bytes.

    Raises
    ------
    ValueError
        "``subject`` needs ... GiB, and ... GiB are free; ``advice``."
    """
    if needed > SMALL and needed > (available := free_bytes(torch.device(device))):
        free = f"{readable(available)} are free; {advice}."
        raise ValueError(f"{subject} needs {readable(needed)}, and {free}")


def readable(n_bytes: float) -> str:
    """Return a number of bytes with a binary unit, such as '931 TiB'."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while n_bytes >= 1024 and len(units) > 1:
        n_bytes, units = n_bytes / 1024, units[1:]
    return f"{n_bytes:,.{0 if n_bytes >= 10 else 1}f} {units[0]}"


def move(value: Any, device: torch.device | str) -> Any:
    """Return dataclasses, sequences, modules on a device, copied where they are not.

    What several of them share is moved once, and is shared afterwards.
    """
    return _moved(value, torch.device(device), {})


def moved_entries(
    state: dict[str, Any], names: Iterable[str], device: torch.device | str
) -> dict[str, Any]:
    """Return a dict with some entries, where there are any, on a device."""
    moved = {name: move(state[name], device) for name in names if name in state}
    return {**state, **moved}


def _moved(value: Any, device: torch.device, known: dict[int, Any]) -> Any:
    """`move`, with what has been moved already by the ``id`` of its original."""
    if id(value) not in known:
        known[id(value)] = _copied(value, device, known)
    return known[id(value)]


def _copied(value: Any, device: torch.device, known: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, nn.Module):
        kinds = {parameter.device.type for parameter in value.parameters()}
        is_there = kinds <= {device.type}
        return value if is_there else copy.deepcopy(value).to(device)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        moved = type(value)(_moved(entry, device, known) for entry in value)
        same = all(new is old for new, old in zip(moved, value, strict=True))
        return value if same else moved
    if is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in fields(value)}
        new = {name: _moved(entry, device, known) for name, entry in old.items()}
        # an object that stays keeps its cached properties
        return value if all(new[k] is old[k] for k in old) else type(value)(**new)
    return value

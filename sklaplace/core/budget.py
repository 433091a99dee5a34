"""Memory: how much there is, in units that people read, and where things are."""

import copy
import os
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Bytes that the work on one batch may take beside the network and the factors of
# the posterior.
BUDGET = 64 * 2**20
# Batches of several rows need not take more than this: it leaves the caches as it is.
CACHE = 32 * 2**20
# Rows below which a network runs much slower per row.
FEW_ROWS = 8


def batch_rows(row_bytes: int) -> int:
    """Rows to a batch where each takes so many bytes, at least one."""
    row_bytes = max(1, row_bytes)
    wanted = max(FEW_ROWS, CACHE // row_bytes)
    return max(1, min(wanted, BUDGET // row_bytes))


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on a device now; an estimate for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:  # Linux counts reclaimable caches too
            sizes = dict(line.split(":") for line in lines)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return 8 * 2**30  # a system that does not say: half of a common laptop


def require_bytes(
    needed: float, device: torch.device | str, subject: str, advice: str
) -> None:
    """Refuse what cannot be allocated, before anything is.

    Raises
    ------
    ValueError
        "``subject`` needs so many bytes, and so many are free; ``advice``."
    """
    available = free_bytes(torch.device(device))
    if needed > available:
        raise ValueError(
            f"{subject} needs {readable(needed)}, and {readable(available)} are free; "
            f"{advice}."
        )


def readable(n_bytes: float) -> str:
    """Bytes with a binary unit, such as '931 TiB'."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while n_bytes >= 1024 and len(units) > 1:
        n_bytes, units = n_bytes / 1024, units[1:]
    return (
        f"{n_bytes:,.0f} {units[0]}" if n_bytes >= 10 else f"{n_bytes:.1f} {units[0]}"
    )


def move(value: Any, device: torch.device | str) -> Any:
    """Nested dataclasses, sequences and modules on a device; copied if need be."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, nn.Module):
        kinds = {parameter.device.type for parameter in value.parameters()}
        is_there = kinds <= {torch.device(device).type}
        return value if is_there else copy.deepcopy(value).to(device)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        moved = type(value)(move(entry, device) for entry in value)
        same = all(new is old for new, old in zip(moved, value, strict=True))
        return value if same else moved
    if is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in fields(value)}
        new = {name: move(entry, device) for name, entry in old.items()}
        # what an object has remembered is kept where it can stay
        return value if all(new[k] is old[k] for k in old) else type(value)(**new)
    return value

"""Batch sizes within a memory budget, checks of free memory, and device transfers."""

import copy
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sklaplace.core.trees import mapped_tensors

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def free_cpu_bytes() -> int:
    """Estimate how many bytes this process can allocate."""
    return max(0, min([_machine(), *_control_groups()]))


def _machine() -> int:
    """Return the free memory of the machine, in bytes.

    Linux reports this number. For other systems, half of all memory is assumed.
    """
    with suppress(OSError, KeyError, ValueError):
        # lines such as "MemAvailable: 1234 kB", which includes caches that can be freed
        with open(PROC / "meminfo") as lines:
            sizes = dict(line.split(":") for line in lines)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 8 * 2**30  # half the memory of a common laptop, if unknown


def _control_groups() -> Iterator[int]:
    """Yield the bytes left under each memory limit of the process's control groups.

    The limits of the process's group and of all groups above it apply. Only control
    groups of version 2 are read.
    """
    group_path = Path()
    with suppress(OSError):
        # version 2 has one line, "0::/" and the path
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
        group_path = Path(*(line[4:] for line in lines if line.startswith("0::/")))
    # in a container, the path may belong to the host and be invisible
    for group in (CGROUPS / folder for folder in (group_path, *group_path.parents)):
        # a group without a limit has "max" instead of a number
        with suppress(OSError, ValueError):
            limit = int((group / "memory.max").read_text())
            left = limit - int((group / "memory.current").read_text())
            stat = (group / "memory.stat").read_text().split()
            counts = dict(zip(stat[::2], stat[1::2], strict=True))
            # the kernel drops cached files if memory is needed
            yield left + int(counts.get("inactive_file", 0))


# Bytes for processing one batch, excluding the network and the posterior's factors.
BUDGET = 64 * 2**20
# Bytes for data kept from one pass over the samples to the next, if the pass can be
# repeated or skipped. All machines use this value, because results may depend on it.
KEPT_BUDGET = 512 * 2**20
# Bytes assumed to be free, because checking takes longer than predicting one row.
SMALL = 2**20
# Bytes of a batch that fits into the caches of a CPU.
CACHE = 32 * 2**20
# Smaller batches take much more time per sample.
FEW_ROWS = 8


def batch_rows(row_bytes: int) -> int:
    """Return the batch size, at least one, for samples of ``row_bytes`` bytes.

    A batch fits into the caches of a CPU (``CACHE``). If this would be fewer than
    ``FEW_ROWS`` samples, a batch may be larger, but not larger than ``BUDGET``, unless
    a single sample is.
    """
    row_bytes = max(1, row_bytes)
    return max(1, min(max(FEW_ROWS, CACHE // row_bytes), BUDGET // row_bytes))


def free_bytes(device: torch.device) -> int:
    """Return the number of free bytes on a device, estimated if it is the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_cpu_bytes()


def require_bytes(
    needed: float, device: torch.device | str, subject: str, advice: str
) -> None:
    """Raise ValueError if the bytes needed exceed both ``SMALL`` and the free memory.

    The free memory is not read for small needs, because reading takes time.

    Raises
    ------
    ValueError
        "``subject`` needs ... GiB, and ... GiB are free; ``advice``."
    """
    if needed > SMALL and needed > (available := free_bytes(torch.device(device))):
        free = f"{readable(available)} are free; {advice}."
        raise ValueError(f"{subject} needs {readable(needed)}, and {free}")


def readable(n_bytes: float) -> str:
    """Format a number of bytes with a binary unit, such as '931 TiB'."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while n_bytes >= 1024 and len(units) > 1:  # the first unit is the current one
        n_bytes, units = n_bytes / 1024, units[1:]
    # at least two digits
    return f"{n_bytes:,.{0 if n_bytes >= 10 else 1}f} {units[0]}"


def move(value: object, device: torch.device | str) -> Any:
    """Move tensors, modules, sequences and dataclasses to a device.

    Values already on the device are returned unchanged; other values are copied. A
    value that several objects share is moved once and stays shared.
    """
    to = torch.device(device)

    def placed(part: Tensor | nn.Module) -> Tensor | nn.Module:
        """Return a tensor or module on the device; copy a module before it is moved."""
        if isinstance(part, Tensor):
            return part.to(to)
        # by type, because torch tells "cuda" from "cuda:0"
        is_there = all(p.device.type == to.type for p in part.parameters())
        return part if is_there else copy.deepcopy(part).to(to)

    return mapped_tensors(placed, value)


def moved_entries(
    state: dict[str, Any], names: Iterable[str], device: torch.device | str
) -> dict[str, Any]:
    """Move the named entries of a dict, if present, to a device; return a new dict."""
    moved = {name: move(state[name], device) for name in names if name in state}
    return {**state, **moved}

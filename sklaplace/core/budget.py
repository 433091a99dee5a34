"""Memory budget: batch sizes, checks of free memory, and moves between devices."""

import copy
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# Files of a control group: its limit, its use, and the entry of memory.stat with the
# part of the use that the kernel takes back when memory is short.
VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
VERSION_2 = "memory.max", "memory.current", "inactive_file"

Group = tuple[Path, str, str, str]  # folder and names of its files


def free_cpu_bytes() -> int:
    """Return the bytes that this process can allocate, an estimate."""
    return max(0, min([_machine(), *_control_groups(), *_address_space()]))


def _machine() -> int:
    """Free bytes of the machine."""
    with suppress(OSError, KeyError, ValueError):
        with open(PROC / "meminfo") as lines:  # Linux, reclaimable caches included
            sizes = dict(line.split(":") for line in lines)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 8 * 2**30  # half of a common laptop, where the system has no answer


def _control_groups() -> Iterator[int]:
    """Bytes that each control group of the process leaves."""
    for folder, limit, use, reclaimable in _folders(PROC, CGROUPS):
        # a group without a limit has "max" in place of a number
        with suppress(OSError, ValueError):
            left = int((folder / limit).read_text())
            if left < 2**60:  # else there is none, in version 1
                left -= int((folder / use).read_text())
                yield left + _entry(folder / "memory.stat", reclaimable)


@cache  # a process rarely changes its groups
def _folders(proc: Path, root: Path) -> list[Group]:
    """Folders of the groups of this process, the innermost first."""
    found: dict[Path, Group] = {}
    with suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = Path(path.lstrip("/"))
            # in a container the path may be the host's, which it does not show
            for mount, files in _interfaces(controllers):
                for folder in (root / mount / group for group in (own, *own.parents)):
                    if (folder / files[0]).exists():
                        found[folder] = (folder, *files)
    return list(found.values())


def _interfaces(controllers: str) -> list[tuple[str, tuple[str, str, str]]]:
    """Mounts that show a group of some controllers, and the names of its files."""
    if not controllers:
        return [("", VERSION_2), ("unified", VERSION_2)]
    return [("memory", VERSION_1)] if "memory" in controllers.split(",") else []


def _entry(path: Path, name: str) -> int:
    """Number behind a name in a file of names and numbers; zero if it is not there."""
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, value = line.split()
            if key == name:
                return int(value)
    return 0


def _address_space() -> Iterator[int]:
    """Bytes that the limit of the address space leaves, if there is one."""
    with suppress(ImportError, OSError, ValueError):
        import resource  # not on Windows

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            pages = int((PROC / "self" / "statm").read_text().split()[0])
            yield limit - pages * resource.getpagesize()


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

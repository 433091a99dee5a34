"""Memory that this process can still allocate: of the machine, of its limits.

Containers and batch systems bound a process by a control group (cgroup), in version 1
or 2 of the kernel's interface, shells and schedulers by ``RLIMIT_AS``. A process that
exceeds a control group is killed without an error.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

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

"""Worker: a process for one library, told to run one operation at a time.

One thread; CPU time of the process; peak memory as growth over what was resident.
"""

import contextlib
import ctypes
import gc
import importlib
import importlib.metadata
import os
import platform
import time
import warnings
from dataclasses import replace
from typing import Any

from benchmarks.operations import Case, Library, NotOfferedError, Operation

LIBRARIES = {
    "torch": ("benchmarks.plain_torch", "PlainTorch"),
    "sklaplace": ("benchmarks.ours", "Sklaplace"),
    "laplace-torch": ("benchmarks.laplace_torch", "LaplaceTorch"),
}
ONE_THREAD = {f"{k}_NUM_THREADS": "1" for k in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}
ONE_THREAD["VECLIB_MAXIMUM_THREADS"] = "1"
# Two of a kind: a fit and the question that it is set up for.
MAX_KEPT = 2


def serve(connection: Any, name: str, max_bytes: int) -> None:
    """Answer requests ``(method, arguments)`` until there are no more."""
    warnings.simplefilter("ignore")
    _limit_memory(max_bytes)
    import torch

    torch.set_num_threads(1)
    module, class_name = LIBRARIES[name]
    jobs = Jobs(getattr(importlib.import_module(module), class_name)())
    gc.collect()
    gc.freeze()  # else each collection looks at all that was imported
    connection.send(("ready", None))
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = connection.recv()
            connection.send(_answer(jobs, method, arguments))


def _answer(jobs: "Jobs", method: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "done", getattr(jobs, method)(*arguments)
    except NotOfferedError as error:
        return "not offered", str(error)
    except Exception as error:
        jobs.forget()
        return "failed", f"{type(error).__name__}: {error}"


class Jobs:
    """What a worker can be asked."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._kept: dict[tuple[Case, str], Operation] = {}

    def forget(self) -> None:
        """Let go of everything that was set up."""
        self._kept.clear()
        gc.collect()

    def _operation(self, case: Case, name: str) -> Operation:
        key = case, name
        if key not in self._kept:
            while len(self._kept) >= MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = self.library.operation(case, name)
        return self._kept[key]

    def seconds(self, case: Case, name: str, number: int = 1) -> float:
        """CPU time of one call, the mean of a number of them."""
        operation = self._operation(case, name)
        arguments = [operation.prepare() for _ in range(number)]
        gc.collect()
        start = time.process_time()
        for argument in arguments:
            operation.run(argument)
        return (time.process_time() - start) / number

    def peak(self, case: Case, name: str) -> int:
        """Bytes that one call needs over network, data and what comes before."""
        if not case.is_quick:  # what is loaded or built once
            self.library.operation(replace(case, is_quick=True), name)()
        operation = self.library.operation(case, name)
        argument = operation.prepare()
        gc.collect()
        _return_free_memory()
        before = _reset_peak()
        operation.run(argument)
        return max(0, _peak() - before)

    def moments(self, case: Case) -> Any:
        return self.library.moments(case)

    def evaluations(self, case: Case) -> int:
        """How often tuning asks for the evidence."""
        count: int = self.library.evaluations(case)  # type: ignore[attr-defined]
        return count

    def versions(self) -> dict[str, str]:
        """Of Python and of the packages at work."""
        found = {"python": platform.python_version()}
        for package in self.library.versions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
        return found


# ---------------------------------------------------------------------- memory
def _limit_memory(max_bytes: int) -> None:
    """Fail to allocate more, where the system knows how."""
    with contextlib.suppress(ImportError, AttributeError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))


def _return_free_memory() -> None:
    """Hand freed memory back, where the C library can: it counts as resident."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _reset_peak() -> int:
    """Start a new peak, on Linux, and return the bytes that are resident now."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return _status("VmRSS")
    except OSError:
        return _peak()


def _peak() -> int:
    try:
        return _status("VmHWM")
    except OSError:
        import resource

        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(name: str) -> int:
    with open(f"/proc/{os.getpid()}/status") as lines:
        sizes = dict(line.split(":", 1) for line in lines)
    return int(sizes[name].split()[0]) * 1024

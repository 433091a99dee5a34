"""Ordered map: a function of parts, in the processes of a joblib backend.

The function and each part are sent as bytes with their task, so that a backend can run
a task again in another worker, and results arrive in the order of the parts. Every
part is computed on one thread, so that its result depends neither on the number of
workers nor on the machine's number of cores.
"""

import gc
import hashlib
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from joblib import Parallel, delayed, effective_n_jobs
from joblib.externals.loky.backend import reduction
from joblib.externals.loky.process_executor import TerminatedWorkerError
from joblib.parallel import get_active_backend
from sklearn.utils.parallel import Parallel as ConfiguredParallel
from sklearn.utils.parallel import delayed as configured_delayed
from torch import Tensor

from sklaplace.core import progress
from sklaplace.core.packing import reduced_as_array
from sklaplace.core.persistence import for_worker

T = TypeVar("T")

# Processes that are killed by the operating system, for want of memory, would be killed
# again.
MAX_RESTARTS = 2
# Parts that each worker may be ahead of the caller, whose results take memory.
AHEAD = 8


def packed(value: Any) -> bytes:
    """Return a pickle; classes and functions of a script or a notebook go by value."""
    return bytes(reduction.dumps(value, reducers={Tensor: _reduced}))


def _reduced(value: Tensor) -> Any:
    return reduced_as_array(value) or value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def n_workers(n_jobs: int | None) -> int:
    """Return the number of workers, 0 for computing here, on torch's own threads.

    That is for None, unless in a ``joblib.parallel_config`` with several workers.
    """
    found = int(effective_n_jobs(n_jobs))
    return 0 if n_jobs is None and found == 1 else found


def in_parallel(
    function: Callable[..., T], given: Sequence[Any], n_jobs: int | None, label: str
) -> list[T]:
    """Return the function of each tuple of arguments, in order, by joblib.

    Workers have scikit-learn's settings. A progress bar counts the results where there
    is one.
    """
    backend, _ = get_active_backend()
    is_streamed = getattr(backend, "supports_return_generator", False)
    # not all backends stream results, and nothing but a bar needs it
    kind = "generator" if is_streamed and progress.shows_bars() else "list"
    tasks = (configured_delayed(function)(*args) for args in given)
    found = ConfiguredParallel(n_jobs=n_jobs, return_as=kind)(tasks)
    return list(progress.tracked(found, label, len(given)))


def ordered_map(
    function: Callable[[Any], Any],
    parts: Sequence[Any],
    load: Callable[[Any], Any] = lambda part: part,
    n_jobs: int | None = None,
) -> Iterator[Any]:
    """Yield ``function(load(part))`` for each part, in order.

    Parameters
    ----------
    function : callable
        Of one part; pickled once, as joblib does.
    parts : sequence
        Parts, as small as can be, such as ranges.
    load : callable
        Makes a part what is sent to a worker; called here, just before it is sent.
    n_jobs : int or None
        Number of workers, as everywhere in scikit-learn; see `n_workers`.

    Raises
    ------
    joblib.externals.loky.process_executor.TerminatedWorkerError
        If processes of the backend "loky" have been killed more often than
        ``MAX_RESTARTS``. Other backends have rules of their own.
    """
    workers = n_workers(n_jobs)
    if workers > 1 and len(parts) > 1:
        yield from _in_workers(function, parts, load, n_jobs)
        return
    for part in parts:
        with torch_threads(1 if workers else None):
            found = function(load(part))
        yield found


def _in_workers(
    function: Callable[[Any], Any],
    parts: Sequence[Any],
    load: Callable[[Any], Any],
    n_jobs: int | None,
) -> Iterator[Any]:
    """`ordered_map` in the workers of a backend; goes on where some were killed."""
    with for_worker():
        pickled = packed(function)
    digest = hashlib.sha256(pickled).digest()
    n_done, n_restarts, n_ahead = 0, 0, AHEAD * n_workers(n_jobs)
    while n_done < len(parts):
        # parts are long, and are neither grouped nor written to temporary files
        engine = Parallel(
            n_jobs,
            prefer="processes",
            return_as="generator",
            batch_size=1,
            max_nbytes=None,
        )
        tasks = (
            delayed(_evaluate)(digest, pickled, packed(load(part)))
            for part in parts[n_done : n_done + n_ahead]
        )
        try:
            for found in engine(tasks):
                yield pickle.loads(found)
                n_done += 1
        except TerminatedWorkerError:
            n_restarts += 1
            if n_restarts > MAX_RESTARTS:
                raise


# the last function of each thread, since several parts have the same one
_last = threading.local()


def _evaluate(digest: bytes, function: bytes, part: bytes) -> bytes:
    """Return the function of a part, in a worker; all are pickled."""
    if getattr(_last, "digest", None) != digest:
        _ignore_imports_in_collections()
        _last.digest, _last.function = None, None  # free its memory first
        _last.function = pickle.loads(function)
        _last.digest = digest
    with torch_threads(1):
        found = _last.function(pickle.loads(part))
    return packed(found)


def _ignore_imports_in_collections() -> None:
    """Have the collections of loky's workers pass over what imports have created.

    Without psutil loky collects all garbage every second, and visiting the objects of
    torch and scikit-learn, which stay in any case, would take a tenth of it.
    """
    is_loky = multiprocessing.current_process().name.startswith("LokyProcess")
    if is_loky and not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


@contextmanager
def torch_threads(n: int | None) -> Iterator[None]:
    """Limit torch to n threads; None leaves their number as it is."""
    before = torch.get_num_threads()
    if n is None or n == before:
        yield
        return
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)

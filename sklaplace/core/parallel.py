"""Apply functions to parts of the data in joblib workers.

Results are in the order of the parts. Each part is processed on one thread, so results
do not depend on the number of workers or cores.
"""

import functools
import io
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from joblib import Parallel, delayed, effective_n_jobs
from joblib.externals.loky.backend.reduction import get_loky_pickler
from joblib.parallel import get_active_backend
from sklearn.base import BaseEstimator
from sklearn.utils.parallel import Parallel as ConfiguredParallel
from sklearn.utils.parallel import ThreadpoolController
from sklearn.utils.parallel import delayed as configured_delayed

from sklaplace.core import progress
from sklaplace.core.serialise import FieldsOnly

T = TypeVar("T")

# Attributes that a net does not need for evaluation, such as a log or an open file.
OF_TRAINING = {"callbacks", "callbacks_", "history_", "optimizer_", "train_split"}


class cached_property(functools.cached_property[T]):  # noqa: N801
    """`functools.cached_property` without the lock of Python 3.11.

    In Python 3.11, all instances share one lock. If a process is forked while another
    thread computes the property, the child's copy of the lock is never released.
    """

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock = nullcontext()


def dumps(value: object, left_out: Set[str] = frozenset()) -> bytes:
    """Pickle an object; classes and functions defined in a script go by value.

    Parameters
    ----------
    value : object
        Value to pickle. The value may contain estimators, such as skorch nets.
    left_out : set of str, default=frozenset()
        Attributes of the estimators that are replaced with None.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.left_out = left_out
    pickler.dump(value)
    return file.getvalue()


class _Pickler(get_loky_pickler()):  # type: ignore[misc]
    """joblib's pickler, extended to pickle estimators and caches by their attributes.

    skorch pickles modules with plain pickle, which cannot pickle classes defined in a
    script. Other estimators compare or copy networks when they are pickled. Workers
    need not recompute cached values.
    """

    left_out: Set[str] = frozenset()

    def reducer_override(self, value: object) -> Any:
        """Pickle estimators and caches by their attributes.

        The attributes in ``left_out`` are replaced by None. Return a pickle reduction:
        the function that creates the object, its arguments, the attributes, and the
        function that sets them. Other objects are left to joblib.
        """
        if isinstance(value, BaseEstimator | FieldsOnly):
            state = dict(vars(value))
            state |= dict.fromkeys(self.left_out & state.keys())
            return object.__new__, (type(value),), state, None, None, _set_attributes
        return super().reducer_override(value)


def _set_attributes(value: object, state: dict[str, Any]) -> None:
    vars(value).update(state)


def n_workers(n_jobs: int | None) -> int:
    """Return the number of workers; 0 means this process, with torch's own threads.

    None means 0, except within a ``joblib.parallel_config`` with several workers.
    """
    n = int(effective_n_jobs(n_jobs))
    return 0 if n_jobs is None and n == 1 else n


class _Result:
    """Result of a function, pickled by `dumps`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.value = function(*args)

    def __reduce__(self) -> Any:
        return _Result, (pickle.loads, dumps(self.value))


def _called(function: Callable[..., Any], *args: object) -> _Result:
    return _Result(function, *args)


def in_parallel(
    function: Callable[..., T],
    arguments: Sequence[Any],
    n_jobs: int | None,
    label: str,
) -> list[T]:
    """Call a function with each tuple of arguments, and return the results in order.

    Workers use the current scikit-learn settings. A progress bar with the given label,
    if shown, counts the results. `_called` wraps each result in a `_Result`, so that it
    is pickled by `dumps`, which also pickles classes defined in a script.
    """
    tasks = (configured_delayed(_called)(function, *args) for args in arguments)
    results = ConfiguredParallel(n_jobs=n_jobs, return_as=_return_as())(tasks)
    tracked = progress.tracked(results, label, len(arguments))
    return [result.value for result in tracked]


def _return_as() -> str:
    """Return whether joblib's current backend yields results or returns a list."""
    backend, _ = get_active_backend()
    yields = getattr(backend, "supports_return_generator", False)
    return "generator" if yields else "list"


def ordered_map(
    function: Callable[[Any], T],
    parts: Sequence[Any],
    *,
    n_jobs: int | None = None,
    label: str = "",
) -> Iterator[T]:
    """Apply a function to each part, and yield the results in order.

    With several workers and parts, joblib is used. Otherwise, the function is applied
    in this process. Each worker, also a single one, uses one thread.

    Parameters
    ----------
    function : callable
        Function of one part. Each worker process or thread has its own copy.
    parts : sequence
        Parts. Each part is read just before it is sent to a worker.
    n_jobs : int or None
        Number of workers; see `n_workers`.
    label : str
        Label of the progress bar that counts the parts, if shown.

    Raises
    ------
    joblib.externals.loky.process_executor.TerminatedWorkerError
        If a process of the "loky" backend is killed, for example when memory runs out.
        Other backends may behave differently.
    """
    workers = n_workers(n_jobs)
    if workers > 1 and len(parts) > 1:
        content = dumps(function, OF_TRAINING)
        tasks = (delayed(_evaluated)(content, dumps(part)) for part in parts)
        # parts take a long time: send them one by one, and write no temporary files
        options = {"prefer": "processes", "batch_size": 1, "max_nbytes": None}
        results = Parallel(n_jobs, return_as=_return_as(), **options)(tasks)
    else:
        # one worker: as in workers, each call is limited to one thread
        results = map(one_thread()(function) if workers else function, parts)
    return progress.tracked(results, label, len(parts))


# each thread's last function, kept because a thread computes several parts
_last = threading.local()


def _evaluated(function: bytes, part: bytes) -> Any:
    """Apply a pickled function to a pickled part, in a worker.

    Each task contains the function and the part as bytes, so that dask can rerun it. A
    thread that computes several parts restores the function only once.
    """
    if getattr(_last, "content", None) != function:
        _last.content = _last.function = None  # free its memory first
        _last.function = one_thread()(pickle.loads(function))
        _last.content = function
    return _last.function(pickle.loads(part))


# threads inside `one_thread`, each with the number to restore when the last one leaves
_inside: dict[int, int] = {}
_counting, _limiting = threading.Lock(), threading.RLock()
_BLAS = ThreadpoolController().select(user_api="blas")


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, in a block of code or in each call of a function.

    The limit applies to the process. If several Python threads enter, the last one to
    leave restores the number that the first one found.
    """
    thread = threading.get_ident()
    if thread in _inside:  # nested: the outer block restores the number
        yield
        return
    with _counting:
        # the number before the limit, which threads already inside remember
        _inside[thread] = next(iter(_inside.values()), torch.get_num_threads())
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _counting:
            # OpenMP has a number for each thread; MKL and new threads share a number
            torch.set_num_threads(_inside.pop(thread))
            if _inside:
                # limit the shared number again, from a thread that does not change
                # this thread's own number
                other = threading.Thread(target=torch.set_num_threads, args=(1,))
                other.start()
                other.join()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit the BLAS of numpy and scipy to one thread, for one caller at a time.

    If limits overlapped, the last thread to leave would restore the other's limit.
    """
    with _limiting, _BLAS.limit(limits=1):
        yield

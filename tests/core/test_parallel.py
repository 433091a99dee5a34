"""Ordered map: every backend has the same results, order and threads."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import joblib
import pytest
import torch
from joblib.parallel import ThreadingBackend
from shared import HANGS
from sklearn.utils.parallel import ThreadpoolController

from sklaplace.core.parallel import (
    n_workers,
    one_blas_thread,
    one_thread,
    ordered_map,
)

PARTS = range(7)


def squares(**options):
    def square(part):
        return torch.tensor(part) ** 2, threading.get_ident(), torch.get_num_threads()

    return list(ordered_map(square, PARTS, **options))


PROCESSES = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("loky", "multiprocessing")
]


@pytest.fixture(params=["threading", *PROCESSES])
def backend(request):
    with joblib.parallel_config(backend=request.param):
        yield


@pytest.mark.usefixtures("backend")
def test_results_are_in_order_and_computed_on_one_thread_elsewhere():
    found, idents, threads = zip(*squares(n_jobs=2), strict=True)
    assert list(map(int, found)) == [part**2 for part in PARTS]
    assert {*threads} == {1}
    if isinstance(joblib.parallel.get_active_backend()[0], ThreadingBackend):
        assert threading.get_ident() not in idents


def torch_numbers():
    """Return the number of threads of torch, here and in a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return torch.get_num_threads(), pool.submit(torch.get_num_threads).result()


def blas_numbers():
    """Return the different numbers of threads of the loaded BLAS libraries."""
    libraries = ThreadpoolController().select(user_api="blas").info()
    return {library["num_threads"] for library in libraries}


@pytest.mark.usefixtures("_two_threads")
def test_here_on_one_thread_or_on_all():
    assert {threads for *_, threads in squares()} == {2}
    assert {threads for *_, threads in squares(n_jobs=1)} == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_two_threads")
def test_the_last_thread_that_leaves_restores_the_number_for_all():
    """torch's number belongs to the process, but OpenMP has one for each thread."""
    entered, may_leave = threading.Event(), threading.Event()

    def work():
        with one_thread():
            entered.set()
            assert may_leave.wait(60)
            inside = torch_numbers()
        return inside, torch_numbers()

    with ThreadPoolExecutor(1) as pool:
        with one_thread(), one_thread():
            other = pool.submit(work)
            assert entered.wait(60)
            assert torch_numbers() == (1, 1)
        assert torch_numbers() == (2, 1)  # the other is still inside
        may_leave.set()
        assert other.result(60) == ((1, 1), (2, 2))
    assert torch_numbers() == (2, 2)


@pytest.mark.usefixtures("_two_threads")
def test_an_error_restores_the_numbers():
    @one_thread()
    @one_blas_thread()
    def fails():
        assert blas_numbers() == {1}
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        fails()
    assert torch_numbers() == (2, 2)
    assert blas_numbers() == {2}


def test_number_of_workers():
    assert [n_workers(n) for n in (None, 1, 3)] == [0, 1, 3]
    with joblib.parallel_config(backend="threading", n_jobs=2):
        assert n_workers(None) == 2


class Counted(Sequence):
    """Numbers up to 40, with a count of the numbers read."""

    n_read = 0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self
        self.n_read += 1
        return range(40)[index]


class Waiting:
    """A function that waits until `ends` for all parts but the first."""

    ends = threading.Event()

    def __call__(self, part):
        assert part == 0 or self.ends.wait(HANGS)
        return part


def test_parts_are_read_one_after_another():
    """Reading all parts at once would need memory for all of them."""
    parts = Counted()
    with joblib.parallel_config(backend="threading"):
        found = ordered_map(Waiting(), parts, n_jobs=2)
        assert next(found) == 0
        assert parts.n_read < 40
        Waiting.ends.set()
        assert list(found) == [*range(1, 40)]


@pytest.mark.usefixtures("backend")
def test_an_error_is_that_of_the_function():
    def fails(part):
        if part == 3:
            raise KeyError("three")
        return part

    with pytest.raises(KeyError, match="three"):
        list(ordered_map(fails, PARTS, n_jobs=2))


@pytest.mark.slow
def test_a_killed_process_is_an_error():
    def kills(part):
        import os
        import signal

        if part == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return part

    from joblib.externals.loky.process_executor import TerminatedWorkerError

    with pytest.raises(TerminatedWorkerError):
        list(ordered_map(kills, PARTS, n_jobs=2))

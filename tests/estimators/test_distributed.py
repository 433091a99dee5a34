"""torch.distributed: processes have the results of one process, or all fail.

Each group of processes starts once and runs the cases of `group_cases`.
"""

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import group_cases
import numpy as np
import pytest
from group_cases import CASES, SUBSETS, Process
from shared import HANGS

from sklaplace.curvature.structures import STRUCTURES

pytestmark = pytest.mark.slow

TESTS = Path(group_cases.__file__).parent
KINDS = [f"{kind}-{subset}" for kind in sorted(STRUCTURES) for subset in SUBSETS]
EQUAL = [*KINDS, "monte-carlo", "trained", "regression"]
EQUAL += ["further-samples", "two-workers"]
# error of the process that fails, and words of its message
FAILURES = {
    "an-input": ("ValueError", "X contains NaN"),
    "a-shard": ("BrokenError", "sample 80 is unreadable"),
}
DIFFERENCES = {
    "targets": "targets",
    "weights": "weights of the network",
    "parameters": "batch_size, n_shards",
}


def run_group(size, folder, names):
    """Return the outcomes of the named cases in each of several processes."""
    program = [sys.executable, str(TESTS / "group_cases.py")]
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    env = os.environ | {"PYTHONPATH": path}
    processes = [
        subprocess.Popen([*program, str(rank), str(size), str(folder), *names], env=env)
        for rank in range(size)
    ]
    end = time.monotonic() + 2 * HANGS  # a case that hangs ends before
    try:
        codes = [process.wait(end - time.monotonic()) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * size
    files = [folder / f"{rank}.pickle" for rank in range(size)]
    return [pickle.loads(file.read_bytes()) for file in files]


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    others = ["a-further-sample", "without-a-seed"]
    names = [*EQUAL, *others, *FAILURES, *DIFFERENCES]
    return run_group(2, tmp_path_factory.mktemp("group"), names)


@pytest.fixture(scope="module")
def alone():
    """Return the results of a case in one process."""
    process, known = Process(), {}

    def computed(name):
        if name not in known:
            known[name] = CASES[name](process)
        return known[name]

    return computed


def assert_close(found, expected):
    """Check equality to 1e-12 of the largest entry of each array."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(found[name], value, 0, 1e-12 * scale, err_msg=name)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("name", EQUAL)
def test_a_group_computes_what_one_process_does(name, group, alone):
    for rank in group:
        assert not isinstance(rank[name], tuple), rank[name]
        assert_close(rank[name], alone(name))
        assert_same(rank[name], group[0][name])


def test_the_draws_of_one_process_are_those_of_all(group):
    assert_same(group[1]["without-a-seed"], group[0]["without-a-seed"])


@pytest.mark.parametrize("name", FAILURES)
def test_the_error_of_one_process_ends_all(name, group):
    kind, words = FAILURES[name]
    *others, last = (rank[name] for rank in group)
    assert last[0] == kind
    assert words in last[1]
    for error, message in others:
        assert error == "OtherProcessError"
        assert f"rank {len(others)}" in message
        assert words in message


def test_the_error_of_one_process_ends_all_in_partial_fit(group):
    first, last = (rank["a-further-sample"] for rank in group)
    assert first[0] == "ValueError"
    assert last[0] == "OtherProcessError"
    assert first[1] in last[1]


@pytest.mark.parametrize("name", DIFFERENCES)
def test_all_processes_are_given_the_same(name, group):
    for error, message in (rank[name] for rank in group):
        assert error == "ValueError"
        assert f"different {DIFFERENCES[name]}. " in message
        assert "Pass the same" in message

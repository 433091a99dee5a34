"""Settings and fixtures shared by all tests."""

import gc
import os

# Read by scipy when it is first imported; without it scikit-learn skips a check.
os.environ["SCIPY_ARRAY_API"] = "1"

from collections import defaultdict
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from sklearn.utils.parallel import ThreadpoolController

from sklaplace.core import budget

BENCHMARKS = Path(__file__).parent / "benchmarks"

# Tests run side by side, so that more threads would only get in each other's way;
# sums of two threads have another order, which `.ci/run` tries.
torch.set_num_threads(int(os.environ.get("SKLAPLACE_TEST_THREADS", "1")))

hypothesis.settings.register_profile("sklaplace", deadline=None, derandomize=True)
hypothesis.settings.load_profile("sklaplace")


# A test with more sets of parameters than this is a table of combinations.
TABLE = 3


def parameters(item):
    """Return the names and values of a test's parameters."""
    return {
        (
            name,
            type(value),
            value if isinstance(value, str | int | float) else id(value),
        )
        for name, value in item.callspec.params.items()
    }


def beyond_every_value(items):
    """Return all combinations except a few that together contain every value."""
    rest = {item: parameters(item) for item in items}
    missing = set().union(*rest.values())
    while missing:
        widest = max(rest, key=lambda item: len(rest[item] & missing))
        missing -= rest.pop(widest)
    return list(rest)


def mark_tables(items):
    """Mark the combinations that repeat parameter values as slow and as table."""
    tables = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tables[item.parent, item.originalname].append(item)
    for table in tables.values():
        if len(table) > TABLE:
            for item in beyond_every_value(table):
                item.add_marker("slow")
                item.add_marker("table")


def mark_examples(items):
    """Mark examples that train a network as slow.

    Those of plots and of most regressors repeat what others show.
    """
    for item in items:
        example = getattr(item, "dtest", None)
        if example is not None and ".fit(" in example.docstring:
            *_, owner, name = example.name.split(".")
            is_twin = "Regressor" in name and name != "LaplaceRegressor"
            if owner[0].isupper() or is_twin or ".plotting." in example.name:
                item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage while thousands of tests are collected, which all stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark slow tests and benchmarks, and skip GPU tests on machines without a GPU."""
    mark_tables(items)
    mark_examples(items)
    needs_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if BENCHMARKS in item.path.parents:
            item.add_marker("benchmark")
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(needs_gpu)


def global_rng_states():
    """Return the states of numpy's and torch's global generators as bytes."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    states = {
        "numpy": (name, keys.tobytes(), *rest),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available():
        cuda = torch.cuda.get_rng_state_all()
        states["torch.cuda"] = [state.numpy().tobytes() for state in cuda]
    return states


@pytest.fixture
def rng_untouched():
    """Fail the test if it changes a global random state."""
    before = global_rng_states()
    yield
    after = global_rng_states()
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"The global random state of {changed} was changed."


@pytest.fixture
def _two_threads():
    """Let torch and BLAS use two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with ThreadpoolController().limit(limits=2, user_api="blas"):
        yield
    torch.set_num_threads(before)


@pytest.fixture
def little_memory(monkeypatch):
    """Return a function that makes the machine appear to have few free bytes."""

    def set_to(n_bytes):
        monkeypatch.setattr(budget, "SMALL", 0)
        monkeypatch.setattr(budget, "free_bytes", lambda device: n_bytes)

    return set_to

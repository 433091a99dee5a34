import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sklaplace.core import budget
from sklaplace.core.budget import free_bytes, readable


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [
        (0, "0.0 bytes"),
        (8, "8.0 bytes"),
        (1000, "1,000 bytes"),
        (1536, "1.5 KiB"),
        (20 * 2**20, "20 MiB"),
        (3.25 * 2**30, "3.2 GiB"),
        (931 * 2**40, "931 TiB"),
        (2**50, "1.0 PiB"),
        (5000 * 2**50, "5,000 PiB"),
    ],
)
def test_readable(n_bytes, expected):
    assert readable(n_bytes) == expected


def test_free_bytes_are_no_more_than_there_are():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2**20 < free_bytes(torch.device("cpu")) <= total


def test_memory_for_little_is_always_there():
    budget.require_bytes(budget.SMALL, "cpu", "this", "use less")
    with pytest.raises(ValueError, match=r"this needs 1\.0 PiB, and .*; use less"):
        budget.require_bytes(2**50, "cpu", "this", "use less")


def test_rows_of_a_batch():
    """A batch holds few large rows, or as many small rows as fit into the cache."""
    assert budget.batch_rows(0) == budget.CACHE
    assert budget.batch_rows(budget.CACHE // 100) == 100
    assert budget.batch_rows(budget.CACHE) == budget.BUDGET // budget.CACHE
    assert budget.batch_rows(budget.BUDGET // budget.FEW_ROWS) == budget.FEW_ROWS
    assert budget.batch_rows(2 * budget.BUDGET) == 1


@dataclass
class Pair:
    left: Any
    right: Any


def test_shared_tensors_are_moved_once():
    """The test uses the meta device, because there may be no second real device."""
    tensor, inner = torch.ones(3), Pair(torch.zeros(2), None)
    found = budget.move(Pair((tensor, inner), [tensor, inner]), "meta")
    assert found.left[0] is found.right[0]
    assert found.left[1] is found.right[1]
    assert found.left[0].is_meta
    assert found.left[1].left.is_meta
    assert not tensor.is_meta


def test_what_is_there_stays():
    value = Pair([torch.ones(3)], torch.nn.Linear(1, 1))
    assert budget.move(value, "cpu") is value

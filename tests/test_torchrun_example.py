"""The torchrun example prints the same numbers in one and in two processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared import HANGS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples/large_data/fit_with_torchrun.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def printed(*options):
    """Return the printed numbers of the example by name."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *options, str(SCRIPT)]
    run = {"check": True, "capture_output": True, "text": True, "timeout": HANGS}
    lines = subprocess.run(command, env=env, **run).stdout.splitlines()
    found = (line.rpartition(" ") for line in lines)
    return {name: float(number) for name, _, number in found}


def test_two_processes_print_what_one_does():
    alone, group = printed(), printed(*TORCHRUN)
    assert (alone.pop("processes"), group.pop("processes")) == (1, 2)
    assert alone.keys() == {"log evidence", "accuracy"}
    assert group == pytest.approx(alone, rel=1e-9)

"""The table of methods: what is printed is what was measured, kept or broken."""

import re
import sys

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt

from examples import run_example

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trust():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["plot_trust.py", "--quick"])
        names, printed = run_example(
            "plot_trust.py", QUICK=("iris", "two targets (30)", "only noise (200)")
        )
    yield names, printed
    plt.close("all")


def row(printed, title, name):
    """Numbers of a row of a table by head."""
    table = printed.split(title)[1].split("\n\n")[0]
    heads = re.split(r" {2,}", table.splitlines()[1].strip())
    (line,) = [line for line in table.splitlines() if line.startswith(name)]
    values = line[len(name) :].split()
    return dict(zip(heads, (float(v.replace("-", "nan")) if v == "-" else float(v) for v in values), strict=True))

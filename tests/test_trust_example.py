"""The table of methods prints the measurements, and marks failures as such."""

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
        yield run_example(
            "studies/plot_trust.py",
            QUICK=("iris", "two targets (30)", "only noise (200)"),
        )
    plt.close("all")


def printed_numbers(printed, title, name):
    """Return the numbers of a table row, with nan for omitted numbers."""
    (line,) = re.findall(rf"^{re.escape(name)}  +(.*)$", printed.split(title)[1], re.M)
    return [float("nan" if number == "-" else number) for number in line.split()]


def test_coverage_of_each_target_is_printed(trust):
    names, printed = trust
    for target in "two targets (30), 0", "two targets (30), 1", "only noise (200)":
        shown = printed_numbers(
            printed.split("\nInterval score")[0], "Coverage", target
        )
        for method, value in zip(names["methods"], shown, strict=True):
            scores = names["number_runs"][target, method][0]
            expected = scores[0] if np.isfinite(scores[1]) else np.nan
            assert value == pytest.approx(expected, abs=6e-4, nan_ok=True)


def test_every_claim_is_printed_with_what_breaks_it(trust):
    names, printed = trust
    claims = printed.split("What should hold")[1]
    for method in names["OURS"]:
        coverage = names["coverage"]("only noise (200)", method)
        holds = "holds" if 0.85 <= coverage <= 0.95 else "DOES NOT HOLD"
        line = f"{holds:15}{method}: coverage in [0.85, 0.95]: "
        assert line in claims
        broken = f"{'':17}only noise (200): {coverage:.4f}"
        assert (broken in claims.split(line)[1].split("\n")[1]) == (holds != "holds")


def test_temperature_scaling_finds_the_scale_of_logits(trust):
    logits = np.random.default_rng(0).normal(size=(20_000, 3))
    draws = (logits + np.random.default_rng(1).gumbel(size=logits.shape)).argmax(1)
    scale = trust[0]["inverse_temperature"]((4 * logits).astype("float32"), draws)
    assert scale == pytest.approx(0.25, abs=0.01)

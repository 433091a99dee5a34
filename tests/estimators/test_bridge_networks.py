"""Examples around networks: what was published of the bridge holds on a small scale."""

import re
from pathlib import Path

import matplotlib as mpl
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt
from costs import counted

from examples import run_example

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def close_figures():
    yield
    plt.close("all")


# ------------------------------------------------- out-of-distribution inputs
@pytest.fixture(scope="module")
def ood():
    return run_example("laplace_bridge/plot_ood.py", SEEDS=(0, 1))


def aurocs(scores, name="inverted"):
    return {m: value for (m, *key), value in scores.items() if key == [name, "AUROC"]}


@pytest.mark.parametrize(
    ("setting", "gain"),
    {
        "last layer, kron": 0.02,
        "last layer, diag": -0.003,
        "all weights, kron": 0.02,
        "all weights, diag": 0.01,
    }.items(),
)
def test_the_corrected_bridge_detects_as_much_as_sampling(ood, setting, gain):
    means = ood[0]["means"][setting]
    found = aurocs(means)
    assert found["bridge_norm"] >= found["mc"] + gain
    assert found["mc"] > found["MAP"] + 0.01
    assert found["bridge"] == pytest.approx(found["MAP"], abs=0.02)
    accuracy = means["MAP", "accuracy"]
    for method in ("mc", "bridge_norm", "projection"):
        assert means[method, "accuracy"] == pytest.approx(accuracy, abs=0.01)


PAGE = Path(__file__).parents[2] / "docs" / "laplace_bridge.rst"


def on_the_page(pattern):
    """Numbers that the page has in the groups of a pattern, across lines."""
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    (found,) = re.findall(pattern, text)
    return [float(number) for number in found]


def test_the_page_has_the_figures_of_the_example(ood):
    """Five splits there, two here: means differ by .039 at most."""
    means, number = ood[0]["means"], r"(\.\d{3})"
    found = on_the_page(
        rf"network {number}; draws {number}; bridge {number}; corrected bridge "
        rf"{number}; Prior Network {number}, or {number} by the mean"
    )
    first = aurocs(means["last layer, kron"])
    trained = aurocs(means["Prior Network"])
    expected = [first[method] for method in ("MAP", "mc", "bridge", "bridge_norm")]
    expected += [trained["Prior Network"], trained["Prior Network, mean"]]
    assert found == pytest.approx(expected, abs=0.045)
    others = "last layer, diag", "all weights, kron", "all weights, diag"
    found = on_the_page(
        rf"last layer, diagonal {number}, {number}; all weights, Kronecker factors "
        rf"{number}, {number}, diagonal {number}, {number}"
    )
    expected = [aurocs(means[s])[m] for s in others for m in ("mc", "bridge_norm")]
    assert found == pytest.approx(expected, abs=0.045)


def test_centred_probits_detect_and_predict_better(ood):
    means, number = ood[0]["means"], r"(\.\d{3})"
    pair = rf"- {number}, {number} "
    rows = ["last layer, Kronecker factors", "last layer, diagonal"]
    rows += ["all weights, Kronecker factors", "all weights, diagonal"]
    for setting, row in zip(ood[0]["SETTINGS"], rows, strict=True):
        found = on_the_page(rf"\* - {row} {pair}{pair}")
        own = means[setting]
        expected = [
            own[link, *key]
            for link in ("probit", "probit_uncentred")
            for key in (("inverted", "AUROC"), ("NLL",))
        ]
        assert found == pytest.approx(expected, abs=0.03)
        assert expected[0] > expected[2] - 0.003
        assert expected[1] < expected[3]


# ------------------------------------------------------------------------- cost
@pytest.fixture(scope="module")
def cost():
    return run_example(
        "laplace_bridge/plot_cost.py", ROWS=1000, DRAWS=(10, 100), ROUNDS=1
    )


def test_the_bridge_and_the_projection_write_less_than_plain_sampling(cost):
    """Bytes are the same on every processor, and differ as times do within 2."""
    written = {}
    for name, function in cost[0]["candidates"].items():
        with counted() as costs:
            function()
        written[name] = costs.written
    ratios = {name: n_bytes / written["bridge"] for name, n_bytes in written.items()}
    # 27.4, 1.09, 11.1, 55.2 and 14.4 times the bridge
    assert ratios["plain sampling, 100"] >= 25
    assert ratios["bridge, norm"] < 1.2
    assert ratios["KL projection"] <= ratios["plain sampling, 100"] / 2.25
    assert ratios["KL projection"] <= ratios["double precision, 100"] / 4.5
    assert 3 <= ratios["mc link, 100"] <= ratios["plain sampling, 100"] / 1.75


# ------------------------------------------------------------------------ top-k
@pytest.fixture(scope="module")
def top_k():
    return run_example("laplace_bridge/plot_top_k.py", SEEDS=(0, 1))


def test_the_projection_covers_more_with_larger_sets(top_k):
    means = top_k[0]["means"]
    for q in (0.01, 0.05, 0.1, 0.2):
        shorter, longer = means["bridge", "top", q], means["projection", "top", q]
        assert (longer[:2] > shorter[:2]).all()
        previous = means["bridge", "previous", q]
        assert previous[0] > shorter[0]
        assert previous[1] >= shorter[1]

"""Network examples: published claims about the bridge hold on a small scale."""

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


def test_centred_probits_detect_and_predict_better(ood):
    for setting in ood[0]["SETTINGS"]:
        own = ood[0]["means"][setting]
        detects, loss = ("inverted", "AUROC"), ("NLL",)
        assert own["probit", *detects] > own["probit_uncentred", *detects] - 0.003
        assert own["probit", *loss] < own["probit_uncentred", *loss]


# ------------------------------------------------------------------------- cost
@pytest.fixture(scope="module")
def cost():
    return run_example(
        "laplace_bridge/plot_cost.py", ROWS=1000, DRAWS=(10, 100), ROUNDS=1
    )


def test_the_bridge_and_the_projection_write_less_than_plain_sampling(cost):
    """Bytes are equal on all processors; their ratios match time ratios within 2."""
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

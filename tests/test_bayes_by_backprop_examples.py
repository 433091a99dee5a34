"""Bayes by Backprop examples: their claims hold on a small scale."""

import re

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt

from examples import run_example

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def close_figures():
    yield
    plt.close("all")


def printed_numbers(printed, row):
    """Return the numbers of the first line that starts with row, except after ±."""
    (line, *_) = re.findall(rf"^ *{re.escape(row)}  +(.*)$", printed, flags=re.M)
    found = re.sub("± *[0-9.]+", "", line).split()
    return [float("nan" if number == "-" else number) for number in found]


# ------------------------------------------------------------------- posteriors
@pytest.fixture(scope="module")
def posteriors():
    return run_example("bayes_by_backprop/plot_posteriors.py", SEEDS=(0,))


def test_no_family_predicts_better(posteriors):
    names = posteriors[0]
    losses = {family: np.mean(runs, 0)[1] for family, runs in names["runs"].items()}
    assert set(losses) == set(names["FAMILIES"])
    assert min(losses.values()) > losses["gaussian"] - 0.1


def test_bands_open_in_the_gap(posteriors):
    names = posteriors[0]
    for runs in names["runs"].values():
        assert np.mean(runs, 0)[names["NAMES"].index("in the gap")] > 2


def test_the_table_of_families_holds_what_was_measured(posteriors):
    names, printed = posteriors
    for family in names["FAMILIES"]:
        shown = printed_numbers(printed, family)
        assert shown == pytest.approx(np.mean(names["runs"][family], 0), abs=0.06)


# -------------------------------------------------------------- width and depth
@pytest.fixture(scope="module")
def sizes():
    return run_example("bayes_by_backprop/plot_width_depth.py", SEEDS=(0,))


def test_wide_networks_lose_the_gap(sizes):
    names = sizes[0]
    for weight in names["KL_WEIGHTS"]:
        at_data, in_gap, elbo = np.transpose(
            [np.mean(names["runs"][weight, size], 0)[2:5] for size in names["SIZES"]]
        )
        ratio = in_gap / at_data
        assert ratio[0] > ratio[1] > ratio[2]  # widths
        assert elbo[0] > elbo[1] > elbo[2]
        assert elbo[3] > elbo[1] > elbo[4]  # depths


# ------------------------------------------------------------------- comparison
@pytest.fixture(scope="module")
def comparison():
    return run_example("bayes_by_backprop/plot_comparison.py", SEEDS=(0,))


def test_learned_posteriors_notice_inverted_digits_most(comparison):
    (run,) = comparison[0]["digits_runs"]
    found = {method: scores["AUROC inv."] for method, scores in run.items()}
    assert found["variational, from scratch"] > found["Laplace, all weights"] + 0.05
    assert found["variational, from scratch"] > found["deep ensemble"] + 0.05
    assert found["Laplace, marglik"] > found["Laplace, all weights"] + 0.05


def test_the_marginal_likelihood_costs_log_loss(comparison):
    (run,) = comparison[0]["digits_runs"]
    assert run["Laplace, marglik"]["NLL"] > run["network alone"]["NLL"] + 0.1
    alone = run["network alone"]
    assert run["deep ensemble"]["NLL"] < alone["NLL"]
    for name in "last layer", "all weights":
        assert run[f"Laplace, {name}"]["NLL"] < alone["NLL"] + 0.01


def test_dropout_is_as_unsure_at_the_data_as_in_the_gap(comparison):
    (run,) = comparison[0]["curve_runs"]
    assert run["MC dropout"]["std, gap/data"] < 2
    assert run["variational, from scratch"]["std, gap/data"] > 3
    assert run["MC dropout"]["RMSE"] > run["network alone"]["RMSE"] + 0.02


# -------------------------------------------------------------------- kl_weight
@pytest.fixture(scope="module")
def kl_weight():
    return run_example(
        "bayes_by_backprop/plot_kl_weight.py", SEEDS=(0,), EPOCHS=(50, 200, 400)
    )


def test_a_weight_of_one_underfits_with_the_highest_elbo(kl_weight):
    names = kl_weight[0]
    for epochs in names["EPOCHS"]:
        tables = [names["means"][w, epochs] for w in names["KL_WEIGHTS"]]
        accuracy, loss, elbo, _, std = np.array(tables).T
        assert elbo.argmax() == 3
        assert accuracy[3] < accuracy[2] - 0.01
        assert loss[3] > loss[2] + 0.02
        assert (np.diff(elbo) > 0).all()
        assert (np.diff(std) > 0).all()


def test_held_out_rows_choose_the_weight(kl_weight):
    names, printed = kl_weight
    assert names["chosen"] == 0.1
    assert re.search(r"^ +0\.1 .*<- chosen$", printed, flags=re.M)

"""Claims in the texts of examples hold on a smaller scale."""

import re

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt
from costs import counted
from idx import write_idx, write_set

from examples import run_example

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def close_figures():
    yield
    plt.close("all")


# ------------------------------------------------------ the Laplace bridge of Gaussians
def rows(printed, *starts):
    """Return the printed lines that start with given words, split into words."""
    lines = [line.split() for line in printed.splitlines()]
    return [line for line in lines if line[: len(starts)] == list(starts)]


@pytest.fixture(scope="module")
def samples():
    return run_example("laplace_bridge/plot_samples.py", MOST=30_000, RUNS=3, ROWS=100)


@pytest.fixture(scope="module")
def simplex():
    return run_example("laplace_bridge/plot_simplex.py", SIDE=24, NODES=40)


@pytest.mark.parametrize("gaussian", ["small", "off-centre"])
def test_a_dirichlet_is_worth_hundreds_of_samples(samples, gaussian):
    worth, distance = samples[0]["worth"], samples[0]["distance"]
    for method in samples[0]["METHODS"]:
        assert worth[gaussian, method] >= 250
    assert distance[gaussian, "projection"] < distance[gaussian, "bridge, centred"]


def test_the_projection_is_the_closest_of_all(simplex):
    distance = simplex[0]["distance"]
    for gaussian in simplex[0]["gaussians"]:
        closest = distance[gaussian, "projection"]
        assert 0 < closest < distance[gaussian, "bridge"]
        assert closest < distance[gaussian, "bridge_norm"]


def test_the_bridge_fails_where_the_text_says(simplex):
    names = simplex[0]
    alphas, distance = names["alphas"], names["distance"]
    means = {key: alpha / alpha.sum() for key, alpha in alphas.items()}
    truth = names["true_means"]
    # not the softmax for small variances, the same mean for large ones
    assert abs(means["small", "bridge"] - truth["small"]).max() > 0.05
    assert abs(means["small", "projection"] - truth["small"]).max() < 0.005
    np.testing.assert_allclose(means["large", "bridge"], means["small", "bridge"])
    # the correction acts on large variances alone
    for gaussian in names["gaussians"]:
        gain = distance[gaussian, "bridge"] - distance[gaussian, "bridge_norm"]
        assert (gain > 0.1) if gaussian == "large" else (gain == 0)
    # sure of the class with the small variance, or with too little for a large one
    assert means["nearly singular", "bridge"][2] > 0.95
    assert truth["nearly singular"][2] < 0.3
    assert truth["correlated"][2] > 3 * means["correlated", "bridge"][2]


@pytest.fixture(scope="module")
def bases():
    return run_example("laplace_bridge/plot_bases.py")


def test_the_corrected_bridge_has_the_published_means(bases):
    names, printed = bases
    for gaussian, (samples, corrected) in names["PUBLISHED"].items():
        found = names["found"][gaussian]
        np.testing.assert_allclose(found["corrected, published"], corrected, atol=6e-5)
        # 10,000 draws: standard errors of at most half a hundredth
        np.testing.assert_allclose(found["truth"], samples, atol=0.015)
        (line,) = rows(printed, *gaussian.split(), "corrected,", "published")
        np.testing.assert_allclose(
            [float(p) for p in line[-len(corrected) :]], corrected
        )


# ------------------------------------------------------- the Laplace bridge of networks
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


def test_the_rule_for_priors_measures_sampling(ood):
    names = ood[0]
    for setting, precision in names["chosen"].items():
        ratios = [
            run["mc", "conf."] / run["MAP", "conf."] for run in names["runs"][setting]
        ]
        expected = names["ratios"][setting, precision]
        assert np.mean(ratios) == pytest.approx(expected, rel=1e-6)


def test_centred_probits_detect_and_predict_better(ood):
    for setting in ood[0]["SETTINGS"]:
        own = ood[0]["means"][setting]
        detects, loss = ("inverted", "AUROC"), ("NLL",)
        assert own["probit", *detects] > own["probit_uncentred", *detects] - 0.003
        assert own["probit", *loss] < own["probit_uncentred", *loss]


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


# ------------------------------------------------ the Laplace bridge on images of files
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write small files of MNIST, notMNIST and Fashion-MNIST."""
    root = tmp_path_factory.mktemp("data")
    write_set(root / "MNIST" / "raw", "train", 300, seed=0)
    raw = root / "MNIST" / "raw"
    _, labels = write_set(raw, "t10k", 100, seed=0)
    labels[:20] += labels[:20] < 9  # wrong labels, so that predictions are wrong
    write_idx(raw / "t10k-labels-idx1-ubyte", labels)
    write_set(root / "FashionMNIST" / "raw", "t10k", 60, seed=1)
    write_set(root, "notmnist-t10k", 60, seed=2, suffix=".gz")
    return str(root)


FILES = "notMNIST", "Fashion"


def test_images_of_files_are_compared(folder):
    names, printed = run_example(
        "laplace_bridge/plot_ood.py",
        ["--data", folder],
        SEEDS=(0, 1),
        EPOCHS_OF_IMAGES=2,
        GRID=(1.0, 100.0),
    )
    for name in FILES:
        table = printed.split(f"AUROC, {name} images")[1]
        largest = [
            max(
                np.std([run[method, name, "AUROC"] for run in names["runs"][setting]])
                for setting in names["SETTINGS"]
            )
            for method in names["SHOWN"]
        ]
        shown = printed_numbers(table, "largest deviation")
        np.testing.assert_allclose(shown, largest, atol=6e-4)
        for setting in names["SETTINGS"]:
            found = aurocs(names["means"][setting], name)
            shown = printed_numbers(table, setting)
            expected = [found[method] for method in names["SHOWN"]]
            np.testing.assert_allclose(shown, expected, atol=6e-4)
    times = printed.split("milliseconds, one image")[1]
    for setting in names["SETTINGS"]:
        assert min(printed_numbers(times, setting)) > 0


def test_sets_of_images_of_files_are_measured(folder):
    names, printed = run_example(
        "laplace_bridge/plot_top_k.py",
        ["--data", folder],
        EPOCHS_OF_IMAGES=2,
        TAILS=(0.1, 0.5),
    )
    for name in FILES:
        table = printed.split(f"{name}, top")[1]
        for method in ("bridge", "projection"):
            length, single, all_ten = printed_numbers(table, f"{method}, q = 0.1")
            X = names["unknown"][name]
            k = names["model"].predict_set(X, q=0.1, method=method).sum(1)
            assert length == pytest.approx(k.mean(), abs=6e-4)
            assert single == pytest.approx((k == 1).mean(), abs=6e-4)
            assert all_ten == pytest.approx((k == 10).mean(), abs=6e-4)


def test_draws_are_counted_for_images_of_files(folder):
    names, printed = run_example(
        "laplace_bridge/plot_samples.py",
        ["--data", folder],
        MOST=1000,
        RUNS=1,
        ROWS=10,
    )
    assert list(names["gaussians"]) == ["MNIST", *FILES]
    for name, (mean, cov) in names["gaussians"].items():
        assert (np.linalg.eigvalsh(cov) > 0).all()
        assert mean.shape == (3,)
        distance = names["distance"]
        assert distance[name, "projection"] <= distance[name, "bridge, centred"] + 1e-3
        assert len(rows(printed, name, "projection")) == 1


# -------------------------------------------------------------------- Bayes by Backprop
def printed_numbers(printed, row):
    """Return the numbers of the first line that starts with row, except after ±."""
    (line, *_) = re.findall(rf"^ *{re.escape(row)}  +(.*)$", printed, flags=re.M)
    found = re.sub("± *[0-9.]+", "", line).split()
    return [float("nan" if number == "-" else number) for number in found]


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


# ----------------------------------------------------------------- the table of methods
@pytest.fixture(scope="module")
def trust():
    return run_example(
        "studies/plot_trust.py",
        ["--quick"],
        QUICK=("iris", "two targets (30)", "only noise (200)"),
    )


def test_coverage_of_each_target_is_printed(trust):
    names, printed = trust
    for target in "two targets (30), 0", "two targets (30), 1", "only noise (200)":
        _, table = printed.split("\nInterval score")[0].split("Coverage", 1)
        shown = printed_numbers(table, target)
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

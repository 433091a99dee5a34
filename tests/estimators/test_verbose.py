"""Output of fits for each ``verbose``: nothing, phases, and progress bars."""

import re
import sys

import joblib
import numpy as np
import pytest
from nets import DropoutMLP, classifier, regressor, seeded
from refusals import CLASSES, CLASSIFIERS, NUMBERS, REGRESSORS
from sklearn.base import is_classifier
from sklearn.frozen import FrozenEstimator

from sklaplace import (
    DeepEnsembleClassifier,
    LaplaceClassifier,
    LaplaceClassifierCV,
    LaplaceRanker,
    LaplaceRegressor,
    LaplaceRegressorCV,
)

X, Y = CLASSES
X_REG, Y_REG = NUMBERS
PAIRS = np.random.default_rng(0).normal(size=(40, 2, 2)).astype(np.float32)
PREFERRED = (PAIRS[:, 1].sum(1) > PAIRS[:, 0].sum(1)).astype(int)

SMALL = {
    "n_samples": 8,
    "n_estimators": 2,
    "n_snapshots": 8,
    "cv": 2,
    "prior_precisions": [0.1, 1.0, 10.0],
    "random_state": 0,
}
EVERY = [*CLASSIFIERS, *REGRESSORS, LaplaceRanker]
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in REGRESSORS]
most = pytest.mark.parametrize("kind", [*CLASSIFIERS, *SLOW, LaplaceRanker])
# phases of each kind, with its defaults and so few samples
LAPLACE = ["train", "train on folds", "curvature", "tune"]
PHASES = {
    "LaplaceClassifier": LAPLACE,
    "LaplaceRegressor": LAPLACE,
    "LaplaceRanker": ["train", "curvature", "tune"],
    "LaplaceClassifierCV": LAPLACE,
    "LaplaceRegressorCV": LAPLACE,
    "DeepEnsembleClassifier": ["train"],
    "DeepEnsembleRegressor": ["train", "tune"],
    "MCDropoutClassifier": ["train"],
    "MCDropoutRegressor": ["train", "tune"],
    "VariationalClassifier": ["train"],
    "VariationalRegressor": ["train", "tune"],
    "SWAGClassifier": ["train", "snapshots"],
    "SWAGRegressor": ["train", "snapshots", "tune"],
}


def made(kind, **params):
    """Return an estimator around a quick net, and its samples."""
    names = kind().get_params(deep=False)
    settings = {name: value for name, value in SMALL.items() if name in names}
    if kind is LaplaceRanker:
        return kind(**{**settings, **params}), (PAIRS, PREFERRED)
    net = classifier if is_classifier(kind()) else regressor
    given = {"estimator": net(DropoutMLP, max_epochs=2), **settings, **params}
    return kind(**given), (CLASSES if is_classifier(kind()) else NUMBERS)


def fitted(kind, **params):
    model, samples = made(kind, **params)
    return model.fit(*samples)


def phases(printed):
    """Return the names of the phases in a text, one line with a time per phase."""
    return re.findall(r"^\[\w+\] ([a-z ]+): (?:under )?\d", printed, re.MULTILINE)


@most
def test_zero_is_silent(kind, capfd):
    model, samples = made(kind)
    outputs = model.fit(*samples).predict(samples[0])
    assert len(outputs) == len(samples[0])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", EVERY)
def test_one_prints_phases_and_a_summary(kind, capsys):
    model = fitted(kind, verbose=1)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert all(line.startswith(f"[{kind.__name__}] ") for line in lines)
    assert phases(out) == PHASES[kind.__name__]
    assert len(lines) == len(phases(out)) + 1
    assert lines[-1] == f"[{kind.__name__}] {model._summary()}"
    assert err == ""


@pytest.mark.parametrize("has_tqdm", [True, False])
@most
def test_two_adds_bars(kind, has_tqdm, capsys, monkeypatch):
    """With tqdm, ``verbose=2`` adds bars to the lines of ``verbose=1``."""
    if not has_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    fitted(kind, verbose=2)
    out, err = capsys.readouterr()
    assert phases(out) == PHASES[kind.__name__]
    assert bool(err) == (has_tqdm and kind.__name__ not in NO_LONG_LOOP)
    for shown in re.findall(r"\[(\w+)\] ", err):
        assert shown == kind.__name__
    assert err.rpartition("\r")[2].strip() == ""  # nothing is left of a bar


# kinds whose fits of few samples have no loop of several steps
NO_LONG_LOOP = {
    *("MCDropoutClassifier", "VariationalClassifier", "VariationalRegressor"),
    "LaplaceRanker",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY)
def test_no_number_changes(kind):
    """Lines and bars change no number, in fit or in predictions."""
    models = [fitted(kind, verbose=verbose) for verbose in (0, 1, 2)]
    samples = made(kind)[1][0]
    silent, *others = (model.predict(samples) for model in models)
    for found in others:
        np.testing.assert_array_equal(found, silent)


class TestLaplace:
    def test_only_what_happens_is_a_phase(self, capsys):
        net = FrozenEstimator(seeded(classifier(), X, Y.astype(np.int64)))
        LaplaceClassifier(net, prior_precision=1.0, verbose=1).fit(X, Y)
        assert phases(capsys.readouterr().out) == ["curvature"]
        fixed = {"prior_precision": 1.0, "refine": True, "verbose": 1}
        LaplaceClassifier(net, **fixed).fit(X, Y)
        assert phases(capsys.readouterr().out) == ["curvature", "refit"]
        LaplaceRegressor(regressor(), sigma_noise=0.1, **fixed).fit(X_REG, Y_REG)
        assert phases(capsys.readouterr().out) == ["train", "curvature", "refit"]

    def test_later_calls(self, capsys):
        model = fitted(LaplaceRegressor, verbose=1)
        capsys.readouterr()
        model.tune(X_REG, Y_REG, parameters="temperature")
        out = capsys.readouterr().out
        assert phases(out) == ["tune"]
        assert out.splitlines()[-1].endswith(model._summary())
        model.partial_fit(X_REG, Y_REG)
        assert phases(capsys.readouterr().out) == ["curvature"]
        model.predict(X_REG, return_std=True)
        assert capsys.readouterr() == ("", "")

    def test_memory(self, capsys, tmp_path):
        given = {"memory": str(tmp_path / "cache"), "verbose": 1}
        fitted(LaplaceClassifier, **given)
        assert "train" in phases(capsys.readouterr().out)
        fitted(LaplaceClassifier, **given)
        out = capsys.readouterr().out
        assert "network and curvature: from memory\n" in out
        assert phases(out) == ["tune"]


class TestWorkers:
    @pytest.mark.slow
    @pytest.mark.parametrize("backend", ["loky", "threading", "multiprocessing"])
    @pytest.mark.parametrize(
        "kind", [LaplaceClassifierCV, LaplaceRegressorCV, DeepEnsembleClassifier]
    )
    def test_lines_are_those_of_one_process(self, kind, backend, capfd):
        with joblib.parallel_config(backend):
            fitted(kind, n_jobs=2, verbose=2)
        out, err = capfd.readouterr()
        assert phases(out) == PHASES[kind.__name__]
        assert re.search(rf"\[{kind.__name__}\] (folds|networks): ", err)


def test_the_last_line_names_the_chosen_hyperparameters(capsys):
    fitted(LaplaceClassifier, refine=False, verbose=1)
    text = capsys.readouterr().out.splitlines()[-1]
    assert "] kron posterior over 21 weights (last_layer)" in text
    for words in ("weights kept", "prior_precision ", "Categorical likelihood"):
        assert words in text
    assert "link_approx " in text
    assert "link_approx auto" not in text
    assert "temperature" not in text
    settings = {"temperature": 2.0, "refine": True, "verbose": 1}
    model = fitted(LaplaceRegressor, **settings)
    text = capsys.readouterr().out.splitlines()[-1]
    for words in ("weights refitted", "temperature 2", "Gaussian likelihood"):
        assert words in text
    assert f"sigma_noise {model.sigma_noise_:.3g}" in text
    assert "link" not in text

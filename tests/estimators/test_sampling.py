"""What all estimators that predict from draws promise."""

import numpy as np
import pytest
from nets import (
    MLP,
    BatchNormMLP,
    RecordTraining,
    blobs,
    classifier,
    regressor,
    seeded,
    waves,
)
from refusals import refused_fit
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNet
from torch import nn

from sklaplace import (
    DeepEnsembleClassifier,
    DeepEnsembleRegressor,
    MCDropoutClassifier,
    MCDropoutRegressor,
    SWAGClassifier,
    SWAGRegressor,
    VariationalClassifier,
    VariationalRegressor,
)

X, Y = blobs()
X_REG, Y_REG = waves(60)
CLASSIFIERS = [
    VariationalClassifier,
    MCDropoutClassifier,
    DeepEnsembleClassifier,
    SWAGClassifier,
]
REGRESSORS = [
    VariationalRegressor,
    MCDropoutRegressor,
    DeepEnsembleRegressor,
    SWAGRegressor,
]
ALL = CLASSIFIERS + REGRESSORS
FAMILIES = {"posterior": ["gaussian", "density"]}


def make(kind, **params):
    """The estimator around a quick net, with few draws."""
    module = BatchNormMLP if "Dropout" in kind.__name__ else MLP
    around = classifier if kind in CLASSIFIERS else regressor
    net = around(module, **{"max_epochs": 15} | params)
    few = {"n_estimators": 3} if "Ensemble" in kind.__name__ else {"n_samples": 7}
    if "SWAG" in kind.__name__:
        few |= {"n_snapshots": 5, "steps_per_snapshot": 2, "lr": 0.03}
    return kind(net, random_state=0, **few)


def rows_of(kind):
    return (X, Y) if kind in CLASSIFIERS else (X_REG, Y_REG)


@pytest.fixture(scope="module")
def models():
    return {kind: make(kind).fit(*rows_of(kind)) for kind in ALL}


@pytest.fixture(params=ALL, ids=lambda kind: kind.__name__)
def model(request, models):
    return models[request.param]


@pytest.fixture
def Z(model):
    return rows_of(type(model))[0]


# ------------------------------------------------------------------- determinism


# ------------------------------------------------------------------- left alone


# ------------------------------------------------------------------- scikit-learn
class TestComposition:
    @pytest.mark.parametrize(
        ("kind", "grid"),
        [
            (VariationalClassifier, FAMILIES | {"kl_weight": [0.1, 1.0]}),
            (VariationalRegressor, {"prior": ["gaussian", "scale_mixture"]}),
            (DeepEnsembleClassifier, {"n_estimators": [1, 2]}),
            (MCDropoutRegressor, {"estimator__module__n_in": [2], "n_samples": [2, 5]}),
            (SWAGClassifier, {"lr": [0.01, 0.1], "max_rank": [2, 3]}),
        ],
    )
    def test_grid_searches(self, kind, grid):
        search = GridSearchCV(make(kind, max_epochs=3), grid, cv=2)
        search.fit(*rows_of(kind))
        assert np.isfinite(search.cv_results_["mean_test_score"]).all()
        assert set(search.best_params_) == set(grid)


# -------------------------------------------------------------------- probabilities
class TestProbabilities:
    @pytest.mark.parametrize("kind", CLASSIFIERS)
    def test_several_labels_per_row(self, kind):
        module = BatchNormMLP if kind is MCDropoutClassifier else MLP
        settings = {"verbose": 0, "train_split": None, "max_epochs": 5}
        net = NeuralNet(module, criterion=nn.BCEWithLogitsLoss, **settings)
        labels = np.stack([Y == 0, Y == 1, Y > 0], 1).astype(int)
        model = kind(net, random_state=0).fit(X, labels)
        assert model.predict_proba(X).shape == (60, 3)
        assert model.predict_dirichlet(X).shape == (60, 3, 2)
        assert model.predict_uncertainty(X).shape == (60, 3, 3)
        assert model.sample_proba(X, 4).shape == (60, 3, 4)
        assert set(np.unique(model.predict(X))) <= {0, 1}

    @pytest.mark.parametrize("kind", CLASSIFIERS)
    def test_weights_of_classes(self, kind):
        rare = np.where(np.arange(60) < 50, 0, 1)
        even = make(kind, module__n_out=2).set_params(class_weight="balanced")
        plain = make(kind, module__n_out=2)
        noise = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
        shares = [m.fit(noise, rare).predict_proba(noise)[:, 1] for m in (even, plain)]
        assert shares[0].mean() > shares[1].mean()


# ------------------------------------------------------------------------- numbers


# ------------------------------------------------------------------------ bad input
class TestBadInput:
    """Values that every one of the six refuses, before it trains anything."""

    def refused(self, kind, words, error=ValueError, **options):
        model = make(kind, callbacks=[RecordTraining()]).set_params(**options)
        refused_fit(model, *words, error=error, data=rows_of(kind))

    @pytest.mark.parametrize("kind", ALL)
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"batch_size": 0}, ["batch_size=0", "Choose 1 or more"]),
            ({"batch_size": 2.5}, ["batch_size=2.5"]),
            ({"random_state": -1}, ["random_state=-1", "Choose None, an integer"]),
            ({"random_state": "seed"}, ["random_state='seed'"]),
            ({"verbose": -1}, ["verbose=-1"]),
            ({"verbose": "no"}, ["verbose='no'"]),
        ],
    )
    def test_common_options(self, kind, options, words):
        self.refused(kind, words, **options)

    @pytest.mark.parametrize("kind", [k for k in ALL if "Ensemble" not in k.__name__])
    @pytest.mark.parametrize("value", [0, -1, 2.5, None, True])
    def test_number_of_draws(self, kind, value):
        self.refused(kind, [f"n_samples={value!r}", "1 or more"], n_samples=value)

    @pytest.mark.parametrize("kind", ALL)
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"estimator": LogisticRegression()}, "skorch"),
            ({"estimator": MLP}, "is the class MLP"),
            ({"likelihood": "gaussian"}, "likelihood"),
        ],
    )
    def test_things_of_another_kind(self, kind, options, words):
        self.refused(kind, [words], TypeError, **options)

    @pytest.mark.parametrize("kind", CLASSIFIERS)
    def test_options_of_classifiers(self, kind):
        words = ["dirichlet_approx='bridged'", "Did you mean 'bridge'?"]
        self.refused(kind, words, dirichlet_approx="bridged")
        self.refused(kind, ["class_weight"], class_weight="even")

    @pytest.mark.parametrize(
        "kind", [MCDropoutRegressor, DeepEnsembleRegressor, SWAGRegressor]
    )
    @pytest.mark.parametrize("value", ["learned", 0, -1.0, None, [[0.1]], [0.1, 0.2]])
    def test_noise(self, kind, value):
        self.refused(kind, ["sigma_noise"], sigma_noise=value)

    @pytest.mark.parametrize("kind", [MCDropoutRegressor, DeepEnsembleRegressor])
    @pytest.mark.parametrize("value", [0, 1.0, -0.1, None, "some"])
    def test_share_of_rows(self, kind, value):
        words = [f"validation_fraction={value!r}", "such as 0.2"]
        self.refused(kind, words, validation_fraction=value)

    @pytest.mark.parametrize(
        "kind", [VariationalRegressor, MCDropoutRegressor, SWAGRegressor]
    )
    def test_one_draw_of_numbers(self, kind):
        self.refused(kind, ["n_samples=1 is not an integer of at least 2"], n_samples=1)

    @pytest.mark.parametrize("kind", ALL)
    def test_rows_that_are_not_seen(self, kind):
        Z, y = rows_of(kind)
        model = make(kind)
        with pytest.raises(ValueError, match="y_val is missing"):
            model.fit(Z, y, X_val=Z)
        model.fit(Z, y, X_val=Z[:20] + 0.1, y_val=y[:20])
        if kind not in CLASSIFIERS:
            alone = make(kind).fit(Z, y)
            assert model.sigma_noise_ != alone.sigma_noise_

    @pytest.mark.parametrize(
        "kind", [VariationalClassifier, MCDropoutClassifier, SWAGClassifier]
    )
    def test_arguments_for_the_training_of_frozen_nets(self, kind):
        net = make(kind).estimator
        model = kind(FrozenEstimator(seeded(net, X, Y)), random_state=0)
        if kind is VariationalClassifier:
            model.fit(X, Y, epochs=3)
            assert len(model.estimator_.history) == 3
            return
        with pytest.raises(TypeError, match=r"'epochs'.*frozen"):
            model.fit(X, Y, epochs=3)

    @pytest.mark.parametrize(
        "kind", [VariationalClassifier, MCDropoutClassifier, SWAGClassifier]
    )
    def test_frozen_nets_that_were_never_trained(self, kind):
        frozen = FrozenEstimator(classifier(BatchNormMLP))
        with pytest.raises(ValueError, match="frozen network has no weights yet"):
            kind(frozen).fit(X, Y)


# ------------------------------------------------------------------------- default
@pytest.mark.parametrize("kind", ALL)
def test_default_networks(kind, rng_untouched):
    Z, y = (part[:30] for part in rows_of(kind))
    few = {"n_snapshots": 5} if "SWAG" in kind.__name__ else {}
    model = kind(random_state=0, **few).fit(Z, y)
    # noise is a third of the variance of the numbers
    assert model.score(Z, y) > (0.7 if kind in CLASSIFIERS else 0.4)

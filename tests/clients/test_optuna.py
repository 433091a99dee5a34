"""optuna: trials over parameters of the estimator and its net."""

import pytest
from nets import classifier
from sklearn.metrics import log_loss

from sklaplace import LaplaceClassifier

optuna = pytest.importorskip("optuna")


def test_trials_improve(classes, figure):
    model = LaplaceClassifier(classifier(max_epochs=3), random_state=0)

    def loss(trial):
        model.set_params(
            prior_precision=trial.suggest_float("prior", 1e-3, 1e4, log=True),
            estimator__lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        )
        X, y = classes.train
        model.fit(X[:200], y[:200])
        return log_loss(classes.cal[1], model.predict_proba(classes.cal[0]))

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(loss, n_trials=20)
    first = min(trial.value for trial in study.trials[:5])
    assert study.best_value <= first < study.trials[0].value
    # the same parameters have the same loss again
    assert loss(study.best_trial) == study.best_value
    figure(first=study.trials[0].value, best=study.best_value)

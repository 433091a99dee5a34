"""scikit-optimize: the regressor as a surrogate, and parameter searches."""

import numpy as np
import pytest
from nets import classifier
from sklearn.model_selection import cross_val_score

from sklaplace import LaplaceClassifier, LaplaceRegressor

skopt = pytest.importorskip("skopt")


def objective(point):
    """Return the objective, which has its minimum of zero at (0.7, -0.3)."""
    return (point[0] - 0.7) ** 2 + (point[1] + 0.3) ** 2


def test_optimiser_with_our_surrogate(figure):
    settings = {"prior_precision": "marglik", "sigma_noise": "marglik"}
    settings |= {"subset_of_weights": "all", "hessian_structure": "full"}
    surrogate = LaplaceRegressor(random_state=0, **settings)
    optimiser = skopt.Optimizer(
        [(-2.0, 2.0), (-2.0, 2.0)],
        base_estimator=surrogate,
        n_initial_points=8,
        acq_func="EI",
        acq_optimizer="sampling",
        random_state=0,
    )
    for _ in range(20):
        point = optimiser.ask()
        optimiser.tell(point, objective(point))
    values = np.array(optimiser.yi)
    initial, best = values[:8].min(), values.min()
    # of as many points at random: 0.17 in the median
    assert best < 0.1
    assert best < initial / 3
    figure(initial=initial, best=best)


def test_search_over_priors(classes, figure):
    model = LaplaceClassifier(classifier(max_epochs=10), random_state=0)
    X, y = classes.train
    X, y = X[:150], y[:150]
    options = {"cv": 3, "scoring": "neg_log_loss"}
    space = {"prior_precision": (1e-3, 1e6, "log-uniform")}
    search = skopt.BayesSearchCV(model, space, n_iter=8, random_state=0, **options)
    search.fit(X, y)
    scores = search.cv_results_["mean_test_score"]
    assert search.best_score_ == max(scores) > min(scores)
    own = model.set_params(**search.best_params_)
    assert cross_val_score(own, X, y, **options).mean() == pytest.approx(max(scores))
    figure(best=max(scores), worst=min(scores))

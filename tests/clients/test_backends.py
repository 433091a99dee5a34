"""Backends of joblib: processes of loky, and workers of dask."""

import joblib
import numpy as np
import pytest
from nets import blobs, classifier
from sklearn.model_selection import GridSearchCV

from sklaplace import DeepEnsembleClassifier, LaplaceClassifier

pytestmark = pytest.mark.slow  # processes have to import torch

X, Y = blobs()
GRID = {"prior_precision": [0.1, 10.0], "temperature": [0.5, 1.0]}


@pytest.fixture(params=["loky", "dask"])
def backend(request):
    """Two processes."""
    if request.param == "loky":
        yield {"backend": "loky", "n_jobs": 2}
        return
    distributed = pytest.importorskip("distributed")
    options = {
        "n_workers": 2,
        "threads_per_worker": 1,
        "dashboard_address": "127.0.0.1:0",
    }
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster):
        yield {"backend": "dask"}


def test_search_and_ensemble_are_as_in_one_process(backend, figure):
    model = LaplaceClassifier(classifier(max_epochs=5), random_state=0)
    ensemble = DeepEnsembleClassifier(
        classifier(max_epochs=5), n_estimators=2, random_state=0, n_jobs=2
    )
    search = GridSearchCV(model, GRID, scoring="neg_log_loss", cv=2)
    with joblib.parallel_config(**backend):
        found = search.set_params(n_jobs=2).fit(X, Y).cv_results_["mean_test_score"]
        proba = ensemble.fit(X, Y).predict_proba(X)
    alone = search.set_params(n_jobs=None).fit(X, Y).cv_results_["mean_test_score"]
    assert len(np.unique(alone)) == 4
    # workers may run torch with other numbers of threads, in float32
    np.testing.assert_allclose(found, alone, rtol=1e-5)
    expected = ensemble.set_params(n_jobs=None).fit(X, Y).predict_proba(X)
    np.testing.assert_allclose(proba, expected, atol=1e-5)
    figure(largest_difference=np.abs(found - alone).max())

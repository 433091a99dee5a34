"""mlflow: models saved and loaded with the scikit-learn flavour."""

import numpy as np
import pytest

from sklaplace import TRUSTED_TYPES

mlflow = pytest.importorskip("mlflow")
flavour = pytest.importorskip("mlflow.sklearn")
pytest.importorskip("mlflow.pyfunc")  # warns of its own type hints


TRUSTED = [*TRUSTED_TYPES, "nets.MLP"]


@pytest.mark.parametrize(
    "options",
    [{"serialization_format": "cloudpickle"}, {"skops_trusted_types": TRUSTED}],
    ids=["cloudpickle", "default"],
)
@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_saved_model_predicts_alike(kind, options, tmp_path, request, figure):
    found = request.getfixturevalue(kind)
    path = str(tmp_path / "model")
    flavour.save_model(found.model, path, pip_requirements=[], **options)
    loaded, X = flavour.load_model(path), found.test[0]
    given = (X, True) if kind == "numbers" else (X,)
    name = "predict" if kind == "numbers" else "predict_proba"
    same = getattr(loaded, name)(*given), getattr(found.model, name)(*given)
    difference = np.abs(np.asarray(same[0]) - np.asarray(same[1])).max()
    assert difference == 0
    figure(largest_difference=difference)

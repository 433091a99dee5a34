"""Modules from `to_module` run in onnxruntime, without torch or sklaplace."""

import re
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from nets import MLP, TinyCNN, classifier, regressor
from torch import nn

from sklaplace import LaplaceClassifier, LaplaceRegressor

pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")

rng = np.random.default_rng(0)
X = rng.standard_normal((120, 2)).astype("f4")
# more than 256 pixels, which the residual hashes
IMAGES = rng.standard_normal((120, 1, 20, 20)).astype("f4")
TOKENS = rng.integers(0, 20, size=(120, 6))
LABELS = np.arange(120) % 3
TARGETS = (np.sin(X[:, :1]) + rng.standard_normal((120, 1)) / 9).astype("f4")
SINGLE = {"prior_precision": 1.0, "random_state": 0}
# Relative errors of mean, variance and result. The exporter writes constants in single
# precision. If every weight of these networks moves by half a unit in the last place,
# the means move by up to 6e-7, the results by 6e-7 and the variances, which grow as a
# power of distances, by 8e-6. The arithmetic of a pass adds to these errors.
LIMITS = 4e-6, 5e-5, 4e-6


class TinyTransformer(nn.Module):
    """A network with embedding, attention, mean over positions and linear head."""

    def __init__(self, n_out=3):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, n_out)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def classified(net, **options):
    return LaplaceClassifier(classifier(net), **SINGLE, **options)


def regressed(net, **options):
    return LaplaceRegressor(regressor(net), **SINGLE, **options)


MODELS = {
    "mlp kron": (classified(MLP()), X, LABELS),
    "mlp diag": (classified(MLP(), hessian_structure="diag"), X, LABELS),
    "mlp full": (classified(MLP(), hessian_structure="full"), X, LABELS),
    "mlp probit": (classified(MLP(), link_approx="probit"), X, LABELS),
    "cnn kron": (classified(TinyCNN()), IMAGES, LABELS),
    "transformer kron": (classified(TinyTransformer()), TOKENS, LABELS),
    "default classifier": (
        LaplaceClassifier(random_state=0),
        X.astype(float),
        LABELS,
    ),
    "regressor kron": (regressed(MLP(n_out=1)), X, TARGETS),
    "regressor full": (regressed(MLP(n_out=1), hessian_structure="full"), X, TARGETS),
    "transformer regressor": (regressed(TinyTransformer(1)), TOKENS, TARGETS),
    "default regressor": (
        LaplaceRegressor(random_state=0),
        X.astype(float),
        TARGETS.ravel(),
    ),
}


def session(module, x, path):
    batch = {0: torch.export.Dim.DYNAMIC}
    torch.onnx.export(module, (x,), path, dynamo=True, dynamic_shapes=(batch,))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options)


def seconds(run):
    """Return the shortest time of a call."""
    times = []
    for _ in range(200):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_equals_estimator(name, tmp_path, figure):
    model, rows, y = MODELS[name]
    model.fit(rows, y)
    module, x = model.to_module(), torch.from_numpy(rows)
    whole = session(module, x[:3], tmp_path / "model.onnx")
    plain = session(model.estimator_.module_.eval(), x[:3], tmp_path / "net.onnx")
    inputs = whole.get_inputs()[0].name
    found = whole.run(None, {inputs: rows})
    expected = [*model.latent_mean_and_variance(rows)]
    is_classifier = isinstance(model, LaplaceClassifier)
    method = model.predict_proba if is_classifier else model.predict_interval
    expected.append(method(rows))
    errors = [
        np.abs(a - b).max() / np.abs(b).max()
        for a, b in zip(found, expected, strict=True)
    ]
    one, name = {inputs: rows[:1]}, plain.get_inputs()[0].name
    figure(
        error=max(errors),
        microseconds=1e6 * seconds(lambda: whole.run(None, one)),
        plain=1e6 * seconds(lambda: plain.run(None, {name: rows[:1]})),
    )
    assert np.less(errors, LIMITS).all()


GUIDE = Path(__file__).parents[2] / "docs" / "user_guide" / "deployment.rst"
BLOCKS = re.compile(r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", re.MULTILINE)


def test_the_guide_writes_one_file_that_loads(tmp_path):
    names = {}
    for block in BLOCKS.findall(GUIDE.read_text(encoding="utf-8")):
        exec(compile(textwrap.dedent(block), GUIDE.name, "exec"), names)
    path, rows = tmp_path / "model.onnx", names["X"][:5]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names["to_onnx"](names["module"], names["rows"], path)
    torch_warns = DeprecationWarning, FutureWarning  # of its own modules
    assert [w for w in caught if not issubclass(w.category, torch_warns)] == []
    assert [*tmp_path.iterdir()] == [path]
    found = ort.InferenceSession(path)
    outputs = [output.name for output in found.get_outputs()]
    assert outputs == ["output_mean", "output_variance", "interval"]
    (interval,) = found.run(["interval"], {found.get_inputs()[0].name: rows})
    np.testing.assert_allclose(interval, names["reg"].predict_interval(rows), rtol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_a_classifier_has_the_names_of_the_guide(tmp_path):
    model = LaplaceClassifier(random_state=0).fit(X.astype(float), LABELS)
    rows, path = torch.from_numpy(X[:3].astype(float)), tmp_path / "model.onnx"
    names = ["output_mean", "output_variance", "proba"]
    batch = ({0: torch.export.Dim.DYNAMIC},)
    options = {"dynamo": True, "dynamic_shapes": batch, "external_data": False}
    torch.onnx.export(model.to_module(), (rows,), path, output_names=names, **options)
    found = ort.InferenceSession(path)
    (proba,) = found.run(["proba"], {found.get_inputs()[0].name: rows.numpy()})
    np.testing.assert_allclose(proba, model.predict_proba(rows.numpy()), rtol=1e-5)

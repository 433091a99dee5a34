"""Every tensor is made where its inputs are: the matrix of devices on a simulated GPU.

The rules of the simulation are compared with those of torch, and mistakes that are made
on purpose are found.
"""

import contextlib
import copy
import importlib
import inspect
import io
import operator
import pickle
import textwrap
import warnings

import joblib
import numpy as np
import pytest
import torch
from device_matrix import CASES, GROUPS, Dropping, trained_there
from nets import MLP
from simulated_device import DeviceError, simulated_gpu
from torch import nn

import sklaplace
from sklaplace.curvature.structures.lowrank import _RandomBasis

# cheap ones, of each group
FAST = [
    "structures/gp-ef",
    "structures/variational-ggn",
    "scores/magnitude",
    "likelihoods/BCELoss-last_layer",
    "tuning/validation-scalar-MSELoss",
    "links/mean_field-tensors",
    "architectures/inputs",
    "variational/gaussian-gaussian",
    "estimators/MCDropoutClassifier",
    "callbacks/diag-all",
    "later/partial_fit-kron",
]


def test_each_group_has_a_fast_case():
    assert {name.split("/")[0] for name in FAST} == set(GROUPS)


def case_ids():
    slow = pytest.mark.slow
    return [name if name in FAST else pytest.param(name, marks=slow) for name in CASES]


def on_simulated_gpu(case):
    """Arrays, after which nothing may have been caught on the way."""
    with simulated_gpu() as violations:
        found = case.run("cuda")
    assert not violations
    return found


# The same kernels compute on both, but optimisers take another path on a GPU, with sums
# of another order.
@pytest.mark.filterwarnings("ignore::UserWarning")  # advice, which differs by case
@pytest.mark.parametrize("name", case_ids())
def test_matrix(name):
    case = CASES[name]
    expected = case.run("cpu")
    for values, others in zip(on_simulated_gpu(case), expected, strict=True):
        np.testing.assert_allclose(values, others, rtol=1e-4, atol=1e-5)


def test_the_basis_of_lowrank_follows_the_device():
    """One accumulator is used on the CPU first, as one that was merged may be."""
    basis = _RandomBasis(p=7, q=3)
    with simulated_gpu() as violations:
        first, second = (basis(torch.device(name)) for name in ("cpu", "cuda"))
        assert not first.is_cuda
        assert second.is_cuda
        torch.testing.assert_close(second.cpu(), first, rtol=0, atol=0)
    assert not violations


# ---------------------------------------------------------------------------- dtypes
# whose networks say their dtype, and are trained before
SAME_DTYPE = ["links", "later", "scores", "structures", "tuning"]


def differing_by_default_dtype(names):
    """Cases whose results depend on the default dtype of torch."""
    found = []
    for name in names:
        expected = CASES[name].run("cpu")
        torch.set_default_dtype(torch.float64)
        try:
            others = CASES[name].run("cpu")
        finally:
            torch.set_default_dtype(torch.float32)
        pairs = list(zip(expected, others, strict=True))
        if not all(np.allclose(a, b, 1e-9, 1e-12, equal_nan=True) for a, b in pairs):
            found.append(name)
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "group",
    [pytest.param(group, marks=pytest.mark.slow) for group in SAME_DTYPE],
)
def test_dtypes_are_those_of_the_inputs(group):
    names = [name for name in CASES if name.startswith(f"{group}/")]
    assert not differing_by_default_dtype(names)


def test_a_dtype_that_is_left_out_is_found(monkeypatch):
    names = ["scores/magnitude", "scores/random"]
    assert not differing_by_default_dtype(names)
    module = importlib.import_module("sklaplace.curvature.subnetwork")
    function, code = with_mistake(module, "random", "dtype=torch.float64, ", "")
    monkeypatch.setattr(function, "__code__", code)
    assert differing_by_default_dtype(names) == ["scores/random"]


# ------------------------------------------------------------------------- mistakes
# module, function or method, what is replaced, by what; and a case that notices
MISTAKES = [
    (
        *("curvature.structures.function_space", "_first_copies"),
        *("rows.keys.to(rows.blocks[0].g.device)", "rows.keys"),
        "structures/gp-ef",
    ),
    (
        *("curvature.structures.function_space", "_first_copies"),
        *("torch.arange(len(owner), device=owner.device)", "torch.arange(len(owner))"),
        "structures/gp-ef",
    ),
    (
        *("curvature.structures.function_space", "_least_explained"),
        *("owner = owner.to(gram.device)", "pass"),
        "structures/variational-ggn",
    ),
    (
        *("curvature.structures.lowrank", "_RandomBasis.__call__"),
        *("generator=generator)", "generator=generator, device=device)"),
        "structures/lowrank-ggn",
    ),
    (
        *("posterior.gaussian", "GaussianPosterior.sample"),
        *("device=generator.device", "device=self.mean.device"),
        "links/nn-MSELoss",
    ),
    (
        *("posterior.tuning.path_search", "with_strongest_prior"),
        *("float((r / ratio).log().abs().max())", "(r / ratio).log().abs().max()"),
        "likelihoods/MSELoss-last_layer-validation",
    ),
    (
        *("dirichlet.logits", "centred_factor"),
        *(", device=cov.device", ""),
        "links/projection",
    ),
    (
        *("estimators.predicting.output_model", "BatchedOutputs.map_gaussian"),
        *("torch.cat(pieces).cpu()", "torch.cat(pieces)"),
        "links/nn-MSELoss",
    ),
]


def with_mistake(module, path, old, new):
    """A function of a module, and its code with a mistake."""
    function = inspect.unwrap(operator.attrgetter(path)(module))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1
    namespace = {}
    exec(source.replace(old, new), vars(module).copy(), namespace)
    return function, namespace[function.__name__].__code__


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m[1]}: {m[3]}")
def test_mistakes_are_found(mistake, monkeypatch):
    place, path, old, new, name = mistake
    module = importlib.import_module(f"sklaplace.{place}")
    function, code = with_mistake(module, path, old, new)
    monkeypatch.setattr(function, "__code__", code)
    CASES[name].run("cpu")  # where nobody notices
    with simulated_gpu() as violations, contextlib.suppress(RuntimeError, ValueError):
        CASES[name].run("cuda")
    assert violations


# ---------------------------------------------------------------------------- files
PREDICT = "Classifier", "ClassifierCV", "Ranker", "Regressor", "RegressorCV"
ESTIMATORS = [name for name in sklaplace.__all__ if name.endswith(PREDICT)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if "Variational" in name else pytest.mark.slow)
        for name in ESTIMATORS
    ],
)
def test_what_was_fitted_on_a_gpu_loads_without_one(name):
    with simulated_gpu():
        module = Dropping if "Dropout" in name else MLP
        is_tuned = name in ("LaplaceClassifier", "LaplaceRegressor", "LaplaceRanker")
        fixed = {"prior_precision": 1.0} if is_tuned else {}
        model, X = trained_there(name, "cuda", module, **fixed)
        file = io.BytesIO()
        joblib.dump(model, file)
    file.seek(0)
    with warnings.catch_warnings():  # of skorch
        warnings.simplefilter("ignore", UserWarning)
        loaded = joblib.load(file)
    assert np.isfinite(loaded.latent_mean_and_variance(X)[0]).all()


# ---------------------------------------------------------------------------- rules
REFUSED = {
    "a sum": lambda gpu, cpu: gpu + cpu,
    "a number on the GPU": lambda gpu, cpu: cpu + gpu.sum(),
    "in place": lambda gpu, cpu: cpu.sum().add_(gpu.sum()),
    "cat": lambda gpu, cpu: torch.cat([gpu, cpu]),
    "where": lambda gpu, cpu: torch.where(cpu > 0, gpu, 0),
    "matmul": lambda gpu, cpu: gpu @ cpu,
    "an index on the GPU": lambda gpu, cpu: cpu[gpu.argsort()],
    "gather": lambda gpu, cpu: gpu.gather(0, cpu.argsort()),
    "index_add": lambda gpu, cpu: gpu.index_add(0, cpu.argsort(), gpu),
    "scatter": lambda gpu, cpu: gpu.scatter(0, gpu.argsort(), cpu),
    "index_put": lambda gpu, cpu: gpu.index_put((cpu.argsort(),), cpu),
    "bincount": lambda gpu, cpu: gpu.argsort().bincount(cpu),
    "isin": lambda gpu, cpu: torch.isin(gpu, cpu),
    "equal": lambda gpu, cpu: torch.equal(gpu, cpu),
    "numpy": lambda gpu, cpu: gpu.numpy(),
    "asarray": lambda gpu, cpu: np.asarray(gpu),
    "a generator": lambda gpu, cpu: gpu.normal_(generator=torch.Generator()),
    "a generator of new numbers": lambda gpu, cpu: torch.rand(
        3, generator=torch.Generator(), device="cuda"
    ),
    "a view": lambda gpu, cpu: gpu[1:].reshape(2, 1) + cpu[1:],
    "a copy": lambda gpu, cpu: copy.deepcopy(gpu) + cpu,
    "a file": lambda gpu, cpu: pickle.loads(pickle.dumps(gpu)) + cpu,
    "zeros like it": lambda gpu, cpu: torch.zeros_like(gpu) + cpu,
    "new zeros": lambda gpu, cpu: gpu.new_zeros(3) + cpu,
    "in inference mode": torch.inference_mode()(lambda gpu, cpu: gpu * cpu),
    "under vmap": lambda gpu, cpu: torch.func.vmap(lambda a: a + cpu)(gpu),
    "a function looked up before": lambda gpu, cpu: ONES(3, device="cuda") + cpu,
}
ONES = torch.ones
ALLOWED = {
    "a number on the CPU": lambda gpu, cpu: gpu * cpu.sum(),
    "an index on the CPU": lambda gpu, cpu: gpu[cpu.argsort()],
    "a mask on the CPU": lambda gpu, cpu: gpu[cpu > 0],
    "values without axes": lambda gpu, cpu: gpu.index_put((cpu.argsort(),), cpu.sum()),
    "masked_fill": lambda gpu, cpu: gpu.masked_fill(gpu > 0, cpu.sum()),
    "copy_": lambda gpu, cpu: gpu.copy_(cpu),
    "to another": lambda gpu, cpu: gpu + cpu.to(gpu),
    "to a name": lambda gpu, cpu: gpu + cpu.to("cuda", torch.float64),
    "to the CPU": lambda gpu, cpu: (cpu + gpu.cpu()).to("cuda"),
    "new": lambda gpu, cpu: gpu + torch.arange(3, device=gpu.device),
    "inside of torch": lambda gpu, cpu: nn.functional.one_hot(gpu.argsort()) * gpu,
    "a scalar": lambda gpu, cpu: torch.where(gpu > 0, gpu, 1.0),
    "a generator": lambda gpu, cpu: gpu.normal_(generator=torch.Generator("cuda")),
    "under vmap": lambda gpu, cpu: torch.func.vmap(lambda a: a.to(gpu) + gpu)(gpu),
}


def both():
    """Tensors (3,) on the GPU and on the CPU."""
    return torch.arange(3.0, device="cuda"), torch.arange(3.0)


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_torch_refuses(name):
    with simulated_gpu() as violations, pytest.raises(DeviceError):
        REFUSED[name](*both())
    assert len(violations) == 1


@pytest.mark.parametrize("name", ALLOWED)
def test_allows_what_torch_allows(name):
    with simulated_gpu() as violations:
        found = ALLOWED[name](*both())
        assert found.is_cuda
    assert not violations


@pytest.mark.gpu
@pytest.mark.parametrize("name", REFUSED)
def test_a_gpu_refuses_the_same(name):
    with pytest.raises((RuntimeError, TypeError)):
        REFUSED[name](*both())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALLOWED)
def test_a_gpu_allows_the_same(name):
    assert ALLOWED[name](*both()).is_cuda


def test_gradients_return_to_the_device_of_their_leaf():
    with simulated_gpu() as violations:
        gpu, cpu = both()
        cpu.requires_grad_()
        (cpu.to(gpu) * gpu).sum().backward()
        assert not cpu.grad.is_cuda
        assert (cpu.grad + torch.ones(3)).sum() == 6
    assert not violations


def test_torch_is_as_before():
    before = {name: vars(torch.Tensor).get(name) for name in ("device", "to", "numpy")}
    with pytest.raises(ZeroDivisionError), simulated_gpu():
        1 / 0  # noqa: B018
    assert {name: vars(torch.Tensor).get(name) for name in before} == before
    assert torch.ones is ONES
    assert not torch.cuda.is_available() or torch.version.cuda

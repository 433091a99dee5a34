"""Every tensor is made on the device of its inputs: tests on a simulated GPU.

The tests also compare the rules of the simulation with torch's rules.
"""

import io
import pickle

import numpy as np
import pytest
import torch
from device_matrix import CASES, GROUPS, dropping, trained_there
from nets import MLP
from simulated_device import GPU, DeviceError, label, simulated_gpu
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
    "links/mean_field",
    "architectures/BatchNorm",
    "variational/gaussian-gaussian",
    "estimators/MCDropoutClassifier",
    "callbacks/diag",
    "later/partial_fit-kron",
]


def test_each_group_has_a_fast_case():
    assert {name.split("/")[0] for name in FAST} == set(GROUPS)


# The same kernels compute on both, but optimisers take another path on a GPU, with sums
# of another order.
@pytest.mark.filterwarnings("ignore::UserWarning")  # advice, which differs by case
@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
        if name != "later/memory"  # files have no labels
    ],
)
def test_matrix(name):
    expected = CASES[name].run("cpu")
    with simulated_gpu() as violations:
        found = CASES[name].run("cuda")
    assert not violations
    for values, others in zip(found, expected, strict=True):
        np.testing.assert_allclose(values, others, rtol=1e-4, atol=1e-5)


def test_the_basis_of_lowrank_follows_the_device():
    """One accumulator is first used on the CPU, as a merged accumulator may be."""
    basis = _RandomBasis(p=7, q=3)
    with simulated_gpu() as violations:
        first, second = (basis(torch.device(name)) for name in ("cpu", "cuda"))
        assert not first.is_cuda
        assert second.is_cuda
        torch.testing.assert_close(second.cpu(), first, rtol=0, atol=0)
    assert not violations


# whose networks say their dtype, and are trained before
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("group", ["links", "later", "scores", "structures", "tuning"])
def test_dtypes_are_those_of_the_inputs(group):
    for name in (name for name in CASES if name.startswith(f"{group}/")):
        expected = CASES[name].run("cpu")
        torch.set_default_dtype(torch.float64)
        try:
            found = CASES[name].run("cpu")
        finally:
            torch.set_default_dtype(torch.float32)
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(one, other, 1e-9, 1e-12, err_msg=name)


# -------------------------------------------------------------------------- pickles
class TensorsOfGPU(pickle.Pickler):
    """Pickler that counts GPU tensors outside nets, which skorch moves itself."""

    count = 0

    def reducer_override(self, value):
        if isinstance(value, torch.Tensor):
            self.count += label(value) == GPU
        return NotImplemented


PREDICT = "Classifier", "ClassifierCV", "Ranker", "Regressor", "RegressorCV"
ESTIMATORS = [name for name in sklaplace.__all__ if name.endswith(PREDICT)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if "Variational" in name else pytest.mark.slow)
        for name in ESTIMATORS
    ],
)
def test_what_was_fitted_on_a_gpu_is_stored_without_one(name):
    module = dropping if "Dropout" in name else MLP
    is_tuned = name in ("LaplaceClassifier", "LaplaceRegressor", "LaplaceRanker")
    fixed = {"prior_precision": 1.0} if is_tuned else {}
    with simulated_gpu():
        model, _ = trained_there(name, "cuda", module, **fixed)
        pickler = TensorsOfGPU(io.BytesIO())
        pickler.dump(model)
    assert pickler.count == 0


# ---------------------------------------------------------------------------- rules
REFUSED = {
    "a sum": lambda gpu, cpu: gpu + cpu,
    "a number on the GPU": lambda gpu, cpu: cpu + gpu.sum(),
    "in place": lambda gpu, cpu: cpu.sum().add_(gpu.sum()),
    "cat": lambda gpu, cpu: torch.cat([gpu, cpu]),
    "an index on the GPU": lambda gpu, cpu: cpu[gpu.argsort()],
    "numpy": lambda gpu, cpu: gpu.numpy(),
    "a generator": lambda gpu, cpu: gpu.normal_(generator=torch.Generator()),
    "a view": lambda gpu, cpu: gpu[1:].reshape(2, 1) + cpu[1:],
    "new zeros": lambda gpu, cpu: gpu.new_zeros(3) + cpu,
    "in inference mode": torch.inference_mode()(lambda gpu, cpu: gpu * cpu),
    "under vmap": lambda gpu, cpu: torch.func.vmap(lambda a: a + cpu)(gpu),
}
ALLOWED = {
    "a number on the CPU": lambda gpu, cpu: gpu * cpu.sum(),
    "an index on the CPU": lambda gpu, cpu: gpu[cpu.argsort()],
    "values without axes": lambda gpu, cpu: gpu.index_put((cpu.argsort(),), cpu.sum()),
    "copy_": lambda gpu, cpu: gpu.copy_(cpu),
    "to another": lambda gpu, cpu: gpu + cpu.to(gpu),
    "to the CPU": lambda gpu, cpu: (cpu + gpu.cpu()).to("cuda"),
    "inside of torch": lambda gpu, cpu: nn.functional.one_hot(gpu.argsort()) * gpu,
    "a scalar": lambda gpu, cpu: torch.where(gpu > 0, gpu, 1.0),
    "under vmap": lambda gpu, cpu: torch.func.vmap(lambda a: a.to(gpu) + gpu)(gpu),
}


def both():
    """Return tensors (3,) on the GPU and on the CPU."""
    return torch.arange(3.0, device="cuda"), torch.arange(3.0)


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_torch_refuses(name):
    with simulated_gpu() as violations, pytest.raises(DeviceError):
        REFUSED[name](*both())
    assert len(violations) == 1


@pytest.mark.parametrize("name", ALLOWED)
def test_allows_what_torch_allows(name):
    with simulated_gpu() as violations:
        assert ALLOWED[name](*both()).is_cuda
    assert not violations


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*REFUSED, *ALLOWED])
def test_a_gpu_has_the_same_rules(name):
    if name in ALLOWED and name not in REFUSED:
        assert ALLOWED[name](*both()).is_cuda
        return
    with pytest.raises((RuntimeError, TypeError)):
        REFUSED[name](*both())

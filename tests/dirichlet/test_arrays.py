"""Arrays and tensors in all public functions: types, batches and other numbers."""

import numpy as np
import pytest
import torch
from dirichlets import ALPHAS, APPROXIMATIONS, FUNCTIONS
from gaussians import arrays

pytestmark = pytest.mark.usefixtures("rng_untouched")

LOGITS = [array.reshape(2, 5, *array.shape[1:]) for array in arrays(10, 4)]
# functions and their arguments, with two axes of distributions
CALLS = {name: (function, [ALPHAS]) for name, function in FUNCTIONS.items()}
CALLS |= {name: (function, LOGITS) for name, function in APPROXIMATIONS.items()}
every_function = pytest.mark.parametrize(
    ("function", "arguments"), CALLS.values(), ids=CALLS.keys()
)


@every_function
def test_tensors_and_arrays_come_back_as_given_and_unchanged(function, arguments):
    copies = [array.copy() for array in arguments]
    tensors = [torch.tensor(array) for array in arguments]
    for array in copies:
        array.flags.writeable = False
    found, twin = function(*copies), function(*tensors)
    assert isinstance(found, np.ndarray)
    assert isinstance(twin, torch.Tensor)
    assert found.dtype == twin.numpy().dtype
    assert found.dtype in (np.float64, bool)
    np.testing.assert_array_equal(found, twin.numpy())
    for array, *others in zip(arguments, copies, tensors, strict=True):
        for other in others:
            np.testing.assert_array_equal(other, array)


@every_function
@pytest.mark.parametrize("dtype", ["float16", "float32", "int64", "uint8"])
def test_other_numbers_are_taken_as_float64(function, arguments, dtype):
    whole = [np.ceil(np.abs(array)).astype(dtype) for array in arguments]
    if len(whole) == 2:  # a covariance
        whole[1] = np.broadcast_to(np.eye(4, dtype=dtype), whole[1].shape)
    expected = function(*(array.astype(float) for array in whole))
    for found in (function(*whole), function(*map(torch.tensor, whole)).numpy()):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    spread = [np.repeat(array, 2, axis=1)[::-1, ::2][::-1] for array in whole]
    np.testing.assert_allclose(function(*spread), expected, rtol=1e-12)


@every_function
def test_leading_axes_are_batches(function, arguments):
    nothing = function(*(array[:0] for array in arguments))
    if function is FUNCTIONS["sample"]:  # of which a row depends on its place
        assert nothing.shape == (1, 0, 5, 4)
        return
    assert nothing.shape[:2] == (0, 5)
    found = function(*arguments)
    assert found.shape[:2] == (2, 5)
    rtol = 1e-12 if function is APPROXIMATIONS["projection"] else 1e-14
    for index in np.ndindex(2, 5):
        alone = function(*(array[index] for array in arguments))
        np.testing.assert_allclose(found[index], alone, rtol=rtol)

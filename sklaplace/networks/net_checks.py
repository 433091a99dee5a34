"""Checks for skorch nets whose custom code or device is not supported."""

from collections.abc import Sized
from typing import Any, cast

import numpy as np
import torch
from sklearn.base import clone
from skorch import NeuralNet
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sklaplace.core.checks import listed
from sklaplace.core.linalg import MANY_ROUNDINGS
from sklaplace.core.trees import copied
from sklaplace.data.dataset import module_of
from sklaplace.likelihoods import (
    ClassificationLikelihood,
    Likelihood,
    RegressionLikelihood,
)
from sklaplace.networks.forward import recorded_outputs, with_attributes


def check_one_module(net: NeuralNet, x: object) -> None:
    """Raise ValueError if a net's outputs depend on modules other than ``module_``.

    Raises
    ------
    ValueError
        If ``infer`` calls another module for the batch ``x``.
    """
    # skorch lists the attributes of a net that are modules
    for name in set(getattr(net, "_modules", ())) - {"module"}:
        other_module = getattr(net, f"{name}_")
        layers = [layer for layer, _ in other_module.named_modules()]
        # the network may need gradients internally; only the calls matter here
        with recorded_outputs(other_module, layers) as calls, torch.enable_grad():
            net.infer(copied(x))
        if calls:
            raise ValueError(
                f"The net's infer also calls {name}_, which the posterior would leave "
                "out, and which would stay in training mode. Put both modules into one "
                "torch.nn.Module and pass it as module."
            )


def check_device(net: NeuralNet) -> None:
    """Raise ValueError for a net on a device that is missing or has no float64."""
    module = getattr(net, "module_", net.module)
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    devices = [net.device, *(parameter.device for parameter in parameters)]
    if any(str(device).startswith("mps") for device in devices):
        raise ValueError(
            "The net is on the device 'mps', which has no float64. The posterior "
            "and predictions need float64 on the device of the net, so use 'cpu' or "
            "'cuda'. Train the net with device='cpu', or move a trained net with "
            "net.set_params(device='cpu') and net.module_.to('cpu')."
        )
    if str(net.device).startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"The net has device={str(net.device)!r}, but torch finds no GPU. Use "
            "net.set_params(device='cpu'), or install a driver and a torch for CUDA."
        )


def check_scripted(net: NeuralNet) -> None:
    """Raise TypeError for TorchScript modules, which have fixed weights and hooks.

    Raises
    ------
    TypeError
        If the net's module or a submodule is a TorchScript module.
    """
    module = getattr(net, "module_", net.module)
    module = getattr(module, "_orig_mod", module)  # the module before torch.compile
    for name, layer in module.named_modules() if isinstance(module, nn.Module) else ():
        if isinstance(layer, torch.jit.ScriptModule):
            where = f"The submodule {name!r}" if name else "The module"
            raise TypeError(
                f"{where} of the net, {layer.original_name}, is TorchScript. Use the "
                "original torch.nn.Module, and load its weights with load_state_dict."
            )


def check_wrapper(net: NeuralNet) -> None:
    """Raise ValueError for an AccelerateMixin net that stays in mixed precision.

    Raises
    ------
    ValueError
        If the module stays wrapped after training. Copies of the module, for example in
        workers and files, are not wrapped.
    """
    accelerator = getattr(net, "accelerator", None)
    precision = getattr(accelerator, "mixed_precision", "no")
    if precision != "no" and not getattr(net, "unwrap_after_train", True):
        raise ValueError(
            "unwrap_after_train=False keeps the module in Accelerate's "
            f"mixed_precision={precision!r}. Copies of the net, such as loaded nets "
            "and copies in workers, lose this setting and predict differently. Use "
            "unwrap_after_train=True, which predicts in full precision, or enter "
            "torch.autocast in the module's forward."
        )


def check_no_lazy_modules(net: NeuralNet) -> None:
    """Raise ValueError if a parameter or buffer of a network has no shape.

    Raises
    ------
    ValueError
        If lazy modules have not seen a batch.
    """
    named = [*net.module_.named_parameters(), *net.module_.named_buffers()]
    names = [name for name, tensor in named if is_lazy(tensor)]
    if names:
        raise ValueError(
            f"The parameters {listed(names)} belong to lazy modules that have not seen "
            "a batch, so they have no sizes. Fit the net before you wrap it, "
            "or call net.infer on a few samples and load the weights."
        )


def check_nonlinearity(net: NeuralNet, raw: Tensor, likelihood: Likelihood) -> None:
    """Raise ValueError if ``predict_nonlinearity`` does not match the criterion.

    The function is applied to ``raw``, the module's outputs for a few samples. The
    result may equal skorch's predictions with "auto", or the predictions implied by the
    likelihood.

    Raises
    ------
    ValueError
        If ``predict_nonlinearity`` and the criterion imply different predictions for a
        few samples.
    """
    nonlinearity = getattr(net, "predict_nonlinearity", None)
    if not callable(nonlinearity):  # None or "auto"
        return
    # what skorch would choose for the criterion
    auto = with_attributes(net, predict_nonlinearity="auto")
    with torch.no_grad():
        try:
            predicted = nonlinearity(raw)
        except Exception as error:  # the user's function can raise any error
            raise ValueError(
                "predict_nonlinearity of the net cannot be applied to the outputs "
                f"{tuple(raw.shape)} of a few samples: {error}. Correct the function, "
                "or use predict_nonlinearity='auto'."
            ) from error
        by_skorch = auto._get_predict_nonlinearity()(raw)
        allowed = [by_skorch, _implied_predictions(raw, likelihood)]
    if not any(_are_equal_predictions(predicted, expected) for expected in allowed):
        raise ValueError(
            "predict_nonlinearity of the net contradicts "
            f"criterion={type(net.criterion_).__name__}, which determines predictions "
            "here. Use predict_nonlinearity='auto', and apply the function in the "
            "module."
        )


def _implied_predictions(raw: Tensor, likelihood: Likelihood) -> Tensor:
    """Return the class probabilities or target means that raw outputs stand for.

    They are the predictions of the likelihood for outputs (b, c) without uncertainty.
    """
    if isinstance(likelihood, ClassificationLikelihood):
        return likelihood.probabilities(raw)
    f = raw.double().numpy(force=True)
    # an output variance and a noise level of zero
    means, _ = cast(RegressionLikelihood, likelihood).moments(f, 0 * f, 0.0)
    return torch.as_tensor(means).to(raw)


def _are_equal_predictions(predicted: object, expected: Tensor) -> bool:
    """Return whether a user's predictions are those expected, up to rounding errors.

    For two classes, probabilities of the second class alone, (b,) or (b, 1), are equal
    to the expected probabilities (b, 2).
    """
    if not isinstance(predicted, Tensor) or not predicted.is_floating_point():
        return False
    has_two_classes = expected.ndim == 2 and expected.shape[1] == 2
    if has_two_classes and predicted.numel() == len(expected):
        predicted, expected = predicted.flatten(), expected[:, 1]
    # well above the rounding errors of float32, or those of a shorter dtype
    atol = max(1e-5, MANY_ROUNDINGS * torch.finfo(predicted.dtype).eps)
    is_same_shape = predicted.shape == expected.shape
    return is_same_shape and torch.allclose(predicted.to(expected), expected, atol=atol)


def is_untouched(net: NeuralNet) -> bool:
    """Return whether an initialised net has no history, and no weight was changed.

    torch counts the changes of each tensor in place, such as updates and loading. A
    newly initialised clone shows how many of them come from the initialisation. A
    module that the user passes as an instance may be trained already.
    """
    if isinstance(net.module, nn.Module) or net.history:
        return False
    initial = module_of(clone(net)).parameters()
    # torch adds one to the _version of a tensor with each change in place
    n_changes = [parameter._version for parameter in net.module_.parameters()]
    return n_changes == [parameter._version for parameter in initial]


def check_sampler(net: Any) -> None:
    """Raise ValueError if a net's loader chooses rows by their position in X."""
    options = net.get_params_for("iterator_train") if isinstance(net, NeuralNet) else {}
    for name in options.keys() & {"sampler", "batch_sampler"}:  # at most one is used
        raise ValueError(
            f"iterator_train__{name} of the net chooses rows of X by position, but fit "
            "holds out some rows, so positions change. Use train_split=None, and pass "
            "X_val and y_val to a fit without folds, which then trains on all of X. Or "
            f"pass sample_weight instead of the {name}."
        )


def leaves_one_sample(net: Any, n: int) -> bool:
    """Return whether batch norm would get a single one of n samples as the last batch.

    ``net`` is a skorch net, or any other value for a default network. Batch norm
    cannot normalise a batch of one sample in training mode.
    """
    options = net.get_params_for("iterator_train") if isinstance(net, NeuralNet) else {}
    # -1 means one batch with all samples; with 1, every batch has one sample, so that
    # leaving out the last would not help
    size = options.get("batch_size", getattr(net, "batch_size", -1))
    if size < 2 or n % size != 1 or options.get("drop_last"):
        return False
    layers = module_of(net).modules()
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in layers)


def whole_batches(net: Any, rows: np.ndarray) -> np.ndarray:
    """Return the training samples of a fold, without a last batch of one sample."""
    return rows[:-1] if leaves_one_sample(net, len(rows)) else rows


def check_held_out_batches(net: NeuralNet, held_out: Sized | None) -> None:
    """Raise ValueError if the loader drops all held-out samples.

    Raises
    ------
    ValueError
        If ``drop_last`` is set and the held-out samples do not fill one batch.
    """
    options = net.get_params_for("iterator_valid")
    size = options.get("batch_size", net.batch_size)
    if held_out is not None and options.get("drop_last") and len(held_out) < size:
        raise ValueError(
            f"iterator_valid__drop_last=True of the net drops all {len(held_out)} "
            f"held-out samples, because the batch size is {size}. Remove the option, "
            "or set a smaller iterator_valid__batch_size."
        )

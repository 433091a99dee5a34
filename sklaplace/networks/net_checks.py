"""Refusals of skorch nets whose own code or device predictions would ignore.

A net of skorch's AccelerateMixin has to unwrap its module after training, by
``unwrap_after_train=True``: copies of the net lose the mixed precision of a wrapper.
"""

import torch
from skorch import NeuralNet
from torch import nn

from sklaplace.core.trees import copied
from sklaplace.networks.forward import recorded_outputs


def check_one_module(net: NeuralNet, x: object) -> None:
    """Refuse a net whose outputs depend on a further module than ``module_``.

    Raises
    ------
    ValueError
        If ``infer`` calls one for a few samples ``x``.
    """
    for name in set(getattr(net, "_modules", ())) - {"module"}:
        part = getattr(net, f"{name}_")
        layers = [layer for layer, _ in part.named_modules()]
        with recorded_outputs(part, layers) as called, torch.enable_grad():
            net.infer(copied(x))
        if called:
            raise ValueError(
                f"The net infers by {name}_ besides module_, whose weights would be "
                "left out, and which would stay in training mode. Put both into one "
                "torch.nn.Module and pass it as module."
            )


def check_device(net: NeuralNet) -> None:
    """Refuse a net on a device that is not there, or has no float64.

    Raises
    ------
    ValueError
        If it is to be trained on a GPU that torch does not see, or on Apple's, or is
        there already.
    """
    module = getattr(net, "module_", net.module)
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    devices = [net.device, *(parameter.device for parameter in parameters)]
    if any(str(device).startswith("mps") for device in devices):
        raise ValueError(
            "The net is on the device 'mps', which has no float64: curvature, "
            "posterior and predictions are computed in float64, on the device of the "
            "net. Allowed are 'cpu' and 'cuda'. Train the net with device='cpu'; move "
            "a trained one by net.set_params(device='cpu') and net.module_.to('cpu')."
        )
    is_new = not getattr(net, "initialized_", False)  # others may have been loaded
    is_on_gpu = str(net.device).startswith("cuda")
    if is_new and is_on_gpu and not torch.cuda.is_available():
        raise ValueError(
            f"The net has device={str(net.device)!r}, but torch sees no GPU here: "
            "torch.cuda.is_available() is False. Use device='cpu', or a build of torch "
            "for the GPU with its driver."
        )


def check_scripted(net: NeuralNet) -> None:
    """Refuse modules of TorchScript, whose weights and hooks torch does not let change.

    Raises
    ------
    TypeError
        If the module of the net, or a part of it, is one.
    """
    module = getattr(net, "module_", net.module)
    module = getattr(module, "_orig_mod", module)
    for name, part in module.named_modules() if isinstance(module, nn.Module) else ():
        if isinstance(part, torch.jit.ScriptModule):
            where = f"The submodule {name!r}" if name else "The module"
            raise TypeError(
                f"{where} of the net, a {part.original_name}, is in TorchScript. Pass "
                "the original torch.nn.Module, with its weights by load_state_dict."
            )


def check_nonlinearity(net: NeuralNet) -> None:
    """Refuse a ``predict_nonlinearity`` of the user's own.

    Raises
    ------
    ValueError
        If it is a function: the criterion implies how outputs become predictions.
    """
    if callable(getattr(net, "predict_nonlinearity", None)):
        raise ValueError(
            "predict_nonlinearity of the net is a function, and predictions follow "
            f"from criterion={type(net.criterion_).__name__}. Use "
            "predict_nonlinearity='auto', and apply further functions in the module."
        )

"""InputType: the dtype in which a network takes its inputs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from torch import nn

from sklaplace.networks.training import private_rng


@dataclass(frozen=True)
class InputType:
    """Dtype of a network's weights, and whether it embeds integers.

    Attributes
    ----------
    dtype : numpy.dtype
        Of the first floating-point parameter.
    keeps_integers : bool
        Whether integer inputs stay integers, as embedding layers need them.
    """

    dtype: np.dtype
    keeps_integers: bool

    def inputs(self, X: np.ndarray) -> np.ndarray:
        """Inputs in the network's dtype, or int64 for an embedding."""
        if X.dtype.kind not in "fiub":
            X = np.asarray(X, dtype=np.float64)
        if self.keeps_integers and X.dtype.kind in "iu":
            return X.astype(np.int64)
        return self.floats(X, "X")

    def floats(self, values: np.ndarray, name: str) -> np.ndarray:
        """Values in the network's dtype; refuses those that overflow in it."""
        with np.errstate(over="ignore"):
            cast = values.astype(self.dtype)
        if not np.isfinite(cast).all() and np.isfinite(values).all():
            raise ValueError(
                f"{name} has values up to {np.abs(values).max():.0e}, too large for "
                f"{self.dtype}, the dtype of the network. Scale {name} "
                "(StandardScaler in a Pipeline), or use a float64 network."
            )
        return cast


def input_type(net: Any) -> InputType:
    """`InputType` of a skorch net; None stands for the default network."""
    if net is None:
        return InputType(np.dtype(np.float64), False)
    module = _module(net)
    if module is None:
        return InputType(np.dtype(np.float32), False)
    floating = [p.dtype for p in module.parameters() if p.is_floating_point()]
    name = str(floating[0] if floating else torch.float32).removeprefix("torch.")
    embeds = any(
        isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in module.modules()
    )
    # numpy has no bfloat16; float32 holds all of its values
    return InputType(np.dtype(name if hasattr(np, name) else "float32"), embeds)


def _module(net: Any) -> Any:
    """Module of a net, or of an initialised clone; None if that needs the data."""
    if getattr(net, "initialized_", False):
        return net.module_
    if isinstance(net.module, nn.Module):
        return net.module
    scratch = clone(net)
    scratch.verbose, scratch.callbacks, scratch.device = 0, "disable", "cpu"
    with private_rng(0):
        try:
            return scratch.initialize().module_
        except (TypeError, ValueError, RuntimeError):
            return None  # a callback sets the sizes when training begins

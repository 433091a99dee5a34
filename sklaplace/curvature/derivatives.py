"""Derivatives with respect to the network's parameters, by automatic differentiation.

This module computes Jacobian rows of parameters outside Linear and convolution layers.
It also computes the Hessian ``∂²L/∂θ∂θᵀ`` of a loss, including the second derivatives
of the network.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap

from sklaplace.core.trees import Batch, mapped, tree_rows
from sklaplace.curvature.layout import BlockSpec, Layout
from sklaplace.curvature.rows import CHUNK_ELEMENTS
from sklaplace.networks.forward import Forward, requiring_grad

DEPENDENT_SAMPLES = (
    "The network's outputs for a sample depend on the other samples of its batch, even "
    "in evaluation mode. Laplace needs one output per sample: let the network treat "
    "samples independently."
)


@contextmanager
def quiet_batching() -> Iterator[None]:
    """Silence torch's warning that an operator has no batching rule."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*batching rule.*", UserWarning)
        yield


def vectorised(
    function: Callable[[Tensor], tuple[Tensor, ...]],
    columns: Tensor,
    chunk_size: int | None = None,
) -> tuple[Tensor, ...]:
    """Apply a function to each column (k, ...) and stack the results on a new axis.

    ``vmap`` is used if possible, for ``chunk_size`` columns at a time, or for all.
    """
    try:
        with quiet_batching():
            return vmap(function, chunk_size=chunk_size)(columns)
    except RuntimeError:  # an operator has no batching rule: column by column
        by_column = [function(column) for column in columns]
        return tuple(torch.stack(results) for results in zip(*by_column, strict=True))


def call_with(forward: Forward, parameters: dict[str, Tensor], x: Batch) -> Tensor:
    """Return the outputs with some of the network's parameters replaced.

    ``parameters`` contains the new values by name. A parameter that several modules
    share has one name, but is replaced in each module. If a module has several names,
    only one of them is used, since torch restores each module only once.
    """
    names = {p: name for name, p in forward.module.named_parameters()}
    # new values by the names within `forward`, one per module that has the parameter
    replaced = {
        f"{prefix}.{key}": parameters[names[parameter]]
        for prefix, module in forward.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        if names[parameter] in parameters
    }
    # `replaced` already has all modules that share a parameter, so nothing is tied
    return functional_call(forward, replaced, (x,), tie_weights=False)


def add_axis(x: Batch) -> Batch:
    """Add a batch axis to one sample."""
    return mapped(lambda leaf: leaf.unsqueeze(0), x)


def dense_rows(
    forward: Forward, x: Batch, blocks: list[BlockSpec], columns: Tensor
) -> dict[str, Tensor]:
    """Return Jacobian rows ``Sᵀ J`` (b, k, p) for ``S`` (b, c, k), by parameter name.

    ``S`` is ``columns``, and p is the number of entries of a parameter. The rows of
    blocks that are not ``one_by_one`` are computed for all samples at once. All other
    rows, or all rows if this fails, are computed sample by sample.
    """
    mapped_blocks = [block for block in blocks if not block.one_by_one]
    try:
        rows = mapped_rows(forward, x, mapped_blocks, columns)
    except RuntimeError:  # an operator without a batching rule
        mapped_blocks, rows = [], {}
    loop_names = [block.name for block in blocks if block not in mapped_blocks]
    if loop_names:
        values = dict(forward.module.named_parameters())
        leaves = [values[name] for name in loop_names]
        with requiring_grad(leaves):
            # rows only; the outputs are known
            pieces = rows_by_loop(forward, x, leaves, columns, may_be_unused=True)[1]
        rows |= zip(loop_names, pieces, strict=True)
    return rows


def mapped_rows(
    forward: Forward, x: Batch, blocks: list[BlockSpec], columns: Tensor
) -> dict[str, Tensor]:
    """Compute `dense_rows` of all samples at once, with ``torch.func.vmap``.

    Raises
    ------
    RuntimeError
        If an operator has no batching rule.
    """
    values = dict(forward.module.named_parameters())
    parameters = {block.name: values[block.name].detach() for block in blocks}
    if not parameters:
        return {}

    def sample_rows(x_n: Batch, columns_n: Tensor) -> dict[str, Tensor]:
        """Return the rows (k, p) of one sample for its columns (c, k), by name."""
        batch = add_axis(x_n)
        # [0] selects the only sample, and [1] the function of the backward pass
        backward = vjp(lambda p: call_with(forward, p, batch)[0], parameters)[1]
        # one backward pass per column; [0] are the gradients of `parameters`
        gradients = vmap(lambda column: backward(column)[0])(columns_n.T)
        return {
            name: value.reshape(len(value), -1).to(columns.dtype)
            for name, value in gradients.items()
        }

    p = sum(value.numel() for value in parameters.values())
    chunk = max(1, CHUNK_ELEMENTS // max(1, columns.shape[-1] * p))
    with quiet_batching():
        rows: dict[str, Tensor] = vmap(sample_rows, chunk_size=chunk)(x, columns)
    return rows


def rows_by_loop(
    call: Callable[[Batch], Tensor],
    x: Batch,
    leaves: Sequence[Tensor],
    columns: Tensor,
    *,
    may_be_unused: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Compute outputs and Jacobian rows by one backward pass per sample and column.

    Return the outputs (b, c), and the rows ``Sᵀ J`` (b, k, p) of each leaf. ``call``
    returns the outputs of a batch. ``leaves`` are the parameters, which must require
    gradients. ``columns`` is ``S`` (b, c, k), with k combinations of the c outputs.
    With ``may_be_unused``, the rows of a sample that uses none of the leaves are zero.
    For example, the leaves may be weights of an expert that processes other samples.

    Raises
    ------
    RuntimeError
        If a sample's outputs have no derivatives, unless ``may_be_unused``.
    ValueError
        If a single sample has no outputs, or not as many as in a batch.
    """
    outputs, rows = [], []
    for n, columns_n in enumerate(columns):
        with torch.enable_grad():
            try:
                f = call(tree_rows(x, slice(n, n + 1)))
            except torch.OutOfMemoryError:  # a RuntimeError that shows no dependence
                raise
            except (RuntimeError, ValueError) as error:  # the batch raised no error
                message = f"{DEPENDENT_SAMPLES} A single sample raised: {error}"
                raise ValueError(message) from error
            if f.shape != (1, len(columns_n)):
                raise ValueError(DEPENDENT_SAMPLES)
            if may_be_unused and not f.requires_grad:
                # a graph with zero derivatives
                f = f + 0 * leaves[0].sum()
            rows += [
                torch.autograd.grad(
                    f[0], leaves, column, retain_graph=True, materialize_grads=True
                )
                for column in columns_n.T
            ]
        outputs.append(f.detach())
    # `rows` has one tuple per sample and column, with one gradient per leaf
    shape = len(columns), columns.shape[-1], -1
    stacked = [torch.stack(p).reshape(shape) for p in zip(*rows, strict=True)]
    # before torch 2.7, zeros of unused leaves have a graph
    return torch.cat(outputs), [piece.detach().to(columns.dtype) for piece in stacked]


def exact_hessian(
    forward: Forward, x: Batch, layout: Layout, loss: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute the Hessian of ``loss(outputs)`` for the selected parameters.

    Parameters
    ----------
    forward : Forward
        The network, inside ``forward.frozen()``.
    x : Tensor, or dict, list or tuple of tensors
        One batch.
    layout : Layout
        The selected parameters.
    loss : callable
        Twice differentiable function that maps outputs (b, c) to a number, ().

    Returns
    -------
    Tensor of shape (P, P)
        Symmetric matrix, in the dtype of the network.

    Notes
    -----
    The cost is P backward passes through the graph of the gradient, which limits the
    function to small models. Each pass multiplies the Hessian by one column of the
    identity, a few columns at a time. The rounding errors of ``H`` are not symmetric,
    so the mean of ``H`` and its transpose is returned.
    """
    parameters = dict(forward.module.named_parameters())
    leaves = [parameters[block.name] for block in layout.blocks]
    grad = partial(torch.autograd.grad, inputs=leaves, materialize_grads=True)
    with torch.enable_grad(), requiring_grad(leaves):
        gradient = layout.flatten(grad(loss(forward(x)), create_graph=True))
        p = len(gradient)
        if not gradient.requires_grad:  # the loss is linear in all leaves
            return gradient.new_zeros(p, p)

        def backward(cotangent: Tensor) -> tuple[Tensor]:
            """Return the product of the Hessian and a vector (P,), as a tuple."""
            pieces = grad(gradient, grad_outputs=cotangent, retain_graph=True)
            return (layout.flatten(pieces),)

        size = max(1, CHUNK_ELEMENTS // max(1, sum(leaf.numel() for leaf in leaves)))
        (hessian,) = vectorised(backward, torch.eye(p).to(gradient), size)
    return (hessian + hessian.T) / 2

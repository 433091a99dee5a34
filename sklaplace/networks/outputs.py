"""OutputSpec: what the outputs of a skorch network mean, before they are trusted.

The criterion tells the likelihood and what the module puts out; a few rows tell
whether it really does. Everything that cannot be right is refused here, with the
network still untrained.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sklaplace.core.budget import batch_rows
from sklaplace.likelihoods import (
    CRITERIA,
    Bernoulli,
    CategoricalMap,
    Likelihood,
    MultilabelBernoulli,
)
from sklaplace.networks.forward import Forward, first_tensor

# default of each criterion's argument that would change the likelihood
_PLAIN = {
    "weight": None,
    "pos_weight": None,
    "label_smoothing": 0.0,
}
_TENSORS = {"weight", "pos_weight"}
# likelihoods whose gradients the tests have seen to
_OWN = {type(likelihood) for likelihood, _ in CRITERIA.values()} | {
    CategoricalMap,
    MultilabelBernoulli,
}
# Copies of the outputs that are alive at once: about as many as the means, variances
# and probabilities in float64 that are made of them.
OUTPUT_COPIES = 14


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """A network's outputs and what they mean.

    Attributes
    ----------
    likelihood : Likelihood
        Of targets given outputs.
    output_map, logit_layer : str
        How outputs are read; see `Forward`.
    n_outputs : int
        Number c of outputs.
    row_bytes : int
        Memory that one row of a batch takes.
    has_two_softmaxes : bool
        Whether probabilities go to a criterion that expects logits.
    output_shape : tuple of int or None
        What the module returns per row.
    """

    likelihood: Likelihood
    output_map: str
    logit_layer: str | None
    n_outputs: int
    row_bytes: int
    has_two_softmaxes: bool = False
    output_shape: tuple[int, ...] | None = None

    @property
    def covariance_size(self) -> int:
        """Numbers in the covariance of one row, of each block of outputs alone."""
        return self.n_outputs**2 // self.likelihood.n_blocks

    def batch_size(
        self, *, row_elements: int = 0, with_covariance: bool = False
    ) -> int:
        """Rows that fit into the memory budget, at least one.

        Parameters
        ----------
        row_elements : int, default=0
            Numbers in float64 that are made of each row.
        with_covariance : bool, default=False
            Whether covariances between the outputs are made: a (c, c) matrix in
            float64, centred, and its root.
        """
        covariances = 3 * self.covariance_size if with_covariance else 0
        return batch_rows(self.row_bytes + 8 * (row_elements + covariances))


def unwrapped(module: nn.Module) -> nn.Module:
    """The module behind drawn weights or ``torch.compile``."""
    return getattr(module, "_orig_mod", module)


def as_forward(
    net: Any,
    output_map: str = "identity",
    logit_layer: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> Forward:
    """The network of a skorch net as a `Forward`; the net is not changed."""
    module = unwrapped(net.module_)
    if module is not net.module_:
        bare = object.__new__(type(net))
        bare.__dict__.update(net.__dict__, module_=module)
        net = bare
    return Forward(module, net.infer, output_map, logit_layer, shape)


def infer_output_spec(
    net: Any,
    x: Any,
    allowed: tuple[type, ...],
    n_targets: int | None,
    *,
    is_trained: bool,
    likelihood: Likelihood | None = None,
    adapted: Callable[[Likelihood], Likelihood] = lambda known: known,
    other: str = "",
) -> OutputSpec:
    """Find out how the outputs of a net are to be read.

    Parameters
    ----------
    net : skorch.NeuralNet
        Initialised, trained or not.
    x : batch
        A few rows.
    allowed : tuple of types
        Likelihoods that the estimator can use.
    n_targets : int or None
        Number of classes or target columns; None where nobody has counted them.
    is_trained : bool
        Words some messages.
    likelihood : Likelihood, optional
        In place of the one that the criterion stands for; the module then returns what
        it takes.
    adapted : callable, optional
        Makes of a likelihood the one for the targets at hand.
    other : str, optional
        Name of the estimator for targets of the other kind, for messages.

    Returns
    -------
    OutputSpec

    Raises
    ------
    ValueError
        If criterion or outputs do not fit.
    """
    with as_forward(net).frozen():
        return measure_outputs(
            net, x, allowed, n_targets, is_trained, likelihood, adapted, other
        )[0]


def measure_outputs(
    net: Any,
    x: Any,
    allowed: tuple[type, ...],
    n_targets: int | None,
    is_trained: bool,
    likelihood: Likelihood | None,
    adapted: Callable[[Likelihood], Likelihood],
    other: str,
) -> tuple[OutputSpec, Tensor, dict[str, int]]:
    """`OutputSpec`, raw outputs, and numbers that each leaf module returns."""
    if likelihood is None:
        likelihood, convention = _likelihood(net, allowed, adapted, other)
    else:
        likelihood, convention = adapted(likelihood), ""
    raw, sizes = _watched(net, x)
    _check_finite(raw, is_trained)
    if n_targets is not None:
        _check_width(raw, likelihood, n_targets)
    sums_to_one = likelihood.is_shift_invariant and _has_columns(raw)
    _check_outputs(net, raw, convention, sums_to_one)
    if type(likelihood) not in _OWN:
        _check_gradient(likelihood, raw)
    output_map, logit_layer = _reading(net, x, convention, sums_to_one)
    c = raw[0].numel()
    elements = 2 * max(sizes.values(), default=0) // len(raw) + OUTPUT_COPIES * c
    found = OutputSpec(
        likelihood=likelihood,
        output_map=output_map,
        logit_layer=logit_layer,
        n_outputs=c,
        row_bytes=elements * raw.element_size(),
        has_two_softmaxes=convention == "logits"
        and sums_to_one
        and _is_distribution(raw, sums_to_one),
        output_shape=tuple(raw.shape[1:]),
    )
    return found, raw, sizes


def warn_if_double_softmax(net: Any, reading: OutputSpec) -> None:
    """Warn of a module that returns probabilities to a criterion for logits."""
    if reading.has_two_softmaxes:
        warnings.warn(
            f"The module returns probabilities, but criterion="
            f"{type(net.criterion_).__name__} applies a softmax itself: this is a "
            "softmax of a softmax. Remove the softmax from the module, or use "
            "criterion=torch.nn.NLLLoss.",
            UserWarning,
            stacklevel=2,
        )


def _likelihood(
    net: Any,
    allowed: tuple[type, ...],
    adapted: Callable[[Likelihood], Likelihood],
    other: str,
) -> tuple[Likelihood, str]:
    """Likelihood and output convention that belong to the net's criterion."""
    criterion = unwrapped(net.criterion_)
    name = type(criterion).__name__
    likelihood, convention = CRITERIA.get(type(criterion), (None, ""))
    if likelihood is None or not isinstance(likelihood, allowed):
        fitting = [k.__name__ for k, v in CRITERIA.items() if isinstance(v[0], allowed)]
        hint = f" For {name} use {other}." if other and likelihood is not None else ""
        raise ValueError(
            f"criterion={name} has no likelihood here. Choose one of "
            f"{', '.join(sorted(fitting))} from torch.nn.{hint}"
        )
    if getattr(criterion, "reduction", "mean") == "none":
        raise ValueError(
            "criterion__reduction='none' gives no loss to train on. Use 'mean', the "
            "default."
        )
    likelihood = adapted(likelihood)
    for option, plain in _PLAIN.items():
        value = getattr(criterion, option, plain)
        is_plain = value is plain or (option not in _TENSORS and value == plain)
        if not is_plain and option not in likelihood.options:
            raise ValueError(
                f"criterion__{option} is set, which changes the likelihood and is "
                "not supported. Leave it at its default; to weight rows or classes, "
                "pass sample_weight to fit."
            )
    _check_ignored(criterion)
    _check_weights(criterion)
    return likelihood.configured(criterion), convention


def _check_weights(criterion: Any) -> None:
    """Refuse weights of a criterion under which a loss would be negative."""
    for option in sorted(_TENSORS):
        weight = getattr(criterion, option, None)
        if weight is not None and not bool(
            (weight >= 0).all() and weight.isfinite().all()
        ):
            raise ValueError(
                f"criterion__{option} has entries that are not finite, or negative. "
                "Choose numbers from 0."
            )


def _check_ignored(criterion: Any) -> None:
    """Refuse to ignore what may be the number of a class."""
    if getattr(criterion, "ignore_index", -1) >= 0:
        raise ValueError(
            f"criterion__ignore_index={criterion.ignore_index} is the number of a "
            "class once labels are numbered from 0. Use a negative one, such as -1, "
            "and label the rows to ignore so."
        )


def raw_outputs(net: Any, x: Any) -> Tensor:
    """What the module returns for a few rows, (b,) or (b, c)."""
    with torch.no_grad():
        try:
            found = first_tensor(as_forward(net).call(x))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"The network cannot be applied to {_described(x)}: "
                f"{str(error).rstrip('.')}. Compare the size and type of its inputs "
                "with that of X; layers that look tokens up take integers."
            ) from error
    if not isinstance(found, Tensor):
        raise TypeError(
            f"The network returns a {type(found).__name__}. Return a tensor, or a "
            "tuple whose first entry is one."
        )
    return found


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"rows of shape {tuple(x.shape[1:])} and type {x.dtype}"
    return f"rows given as {type(x).__name__}"


def _check_finite(raw: Tensor, is_trained: bool) -> None:
    if raw.isfinite().all():
        return
    if not is_trained:
        raise ValueError(
            "The outputs of the untrained network are not finite for the first rows "
            "of X. Scale the inputs (StandardScaler in a Pipeline)."
        )
    raise ValueError(
        "The network's outputs are not finite: its training has diverged, or its "
        "weights were not loaded. Lower the learning rate, scale the inputs, and "
        "look at net.history for the epoch in which it began."
    )


def _check_outputs(net: Any, raw: Tensor, convention: str, sums_to_one: bool) -> None:
    """Refuse outputs that contradict the criterion."""
    if convention == "probabilities" and not _is_distribution(raw, sums_to_one):
        raise ValueError(
            f"criterion={type(net.criterion_).__name__} needs a module that returns "
            "probabilities (skorch takes their logarithm itself), but this one "
            "returns logits or log-probabilities. End the module with a softmax (or "
            "sigmoid), or use the criterion for logits: torch.nn.CrossEntropyLoss "
            "(or torch.nn.BCEWithLogitsLoss)."
        )


def _has_columns(raw: Tensor) -> bool:
    return raw.ndim > 1 and raw.shape[1] > 1


def _is_distribution(raw: Tensor, sums_to_one: bool) -> bool:
    """Whether outputs lie in [0, 1] and, where they are of one label, sum to one."""
    inside = bool(((raw >= 0) & (raw <= 1)).all())
    if not sums_to_one:
        return inside
    total = raw.sum(1)
    return inside and bool(torch.allclose(total, torch.ones_like(total), atol=1e-4))


def _reading(
    net: Any, x: Any, convention: str, sums_to_one: bool
) -> tuple[str, str | None]:
    """Output map and logit_layer: how logits are read from what the module returns.

    A submodule is tapped if its outputs are the logits of the probabilities for
    the rows given and, where the first layer takes real numbers, for rows shrunk
    towards zero: rows that are predicted with certainty agree with too much.
    """
    if convention != "probabilities":
        return "identity", None
    binary = not sums_to_one
    batches = [x]
    if isinstance(x, Tensor) and x.is_floating_point():
        batches += [0.1 * x, 0 * x]
    agreeing = [_logit_layers(net, batch, binary) for batch in batches]
    for name in agreeing[0]:
        if all(name in names for names in agreeing):
            return "identity", name
    return ("logit" if binary else "log"), None


def _logit_layers(net: Any, x: Any, binary: bool) -> list[str]:
    """Submodules, last first, that put out the logits of the net's probabilities."""
    seen: dict[str, list[Any]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda _m, _i, out: seen.setdefault(name, []).append(out)

    handles = [
        module.register_forward_hook(note(name))
        for name, module in as_forward(net).module.named_modules()
        if not any(module.children())
    ]
    try:
        raw = raw_outputs(net, x)
    finally:
        for handle in handles:
            handle.remove()
    return [
        name
        for name, (out, *again) in reversed(seen.items())
        if isinstance(out, Tensor) and not again and _are_logits(out, raw, binary)
    ]


def _are_logits(out: Tensor, raw: Tensor, binary: bool) -> bool:
    """Whether softmax or sigmoid of ``out`` is ``raw``, compared in logarithms."""
    if out.numel() != raw.numel() or (raw.ndim > 2 and out.shape != raw.shape):
        return False
    logits = out.reshape(raw.shape)
    log = nn.functional.logsigmoid(logits) if binary else logits.log_softmax(1)
    told_apart = raw > torch.finfo(raw.dtype).tiny * 1e6
    difference = (log - raw.log())[told_apart].abs()
    return bool((difference <= 1e-4 * (1 + log[told_apart].abs())).all())


def _check_gradient(likelihood: Likelihood, raw: Tensor) -> None:
    """Refuse a likelihood whose gradient is not that of its loss."""
    f = raw.detach().double().reshape(len(raw), -1)
    u = torch.linspace(0.05, 0.95, len(f), dtype=f.dtype, device=f.device)
    n = likelihood.n_draws(f.shape[1])
    y = likelihood.draw(f, u.unsqueeze(1).expand(-1, n))
    with torch.enable_grad():
        leaf = f.clone().requires_grad_()
        (expected,) = torch.autograd.grad(likelihood.loss(leaf, y).sum(), leaf)
    error = (likelihood.gradient(f, y) - expected).abs().max()
    if not error <= 1e-6 * (1 + expected.abs().max()):
        raise ValueError(
            f"The gradient of {type(likelihood).__name__} is not that of its loss: "
            f"they differ by {float(error):.2g}. Compare likelihood.gradient with "
            "automatic differentiation of likelihood.loss."
        )


def _check_width(raw: Tensor, likelihood: Likelihood, n_targets: int) -> None:
    """Compare the number of outputs with that of classes or target columns."""
    shape = likelihood.output_shape(n_targets)
    if len(shape) > 1:
        _check_map(raw, shape)
        return
    if raw.ndim > 2:
        raise ValueError(
            f"The network gives outputs of shape {tuple(raw.shape[1:])} per row; "
            "one vector per row is supported for these targets. Flatten them in the "
            "module, or, for a class at every position, pass y of shape "
            f"{('n', *raw.shape[2:])} with criterion=torch.nn.CrossEntropyLoss."
        )
    found = 1 if raw.ndim == 1 else raw.shape[1]
    needed = likelihood.n_outputs(n_targets)
    if found == needed:
        return
    noun = likelihood.noun
    plural = {"column": "columns", "class": "classes", "label": "labels"}
    advice = f"Set the size of its last layer to {needed}."
    if isinstance(likelihood, Bernoulli) and n_targets > 2:
        advice = (
            f"One logit tells two classes apart; for {n_targets} use "
            "skorch.NeuralNetClassifier with criterion=torch.nn.CrossEntropyLoss and "
            f"a last layer of size {n_targets}."
        )
    raise ValueError(
        f"The network gives {found} output{'s' if found != 1 else ''}, but y has "
        f"{n_targets} {noun if n_targets == 1 else plural[noun]}. {advice}"
    )


def _check_map(raw: Tensor, shape: tuple[int, ...]) -> None:
    """Compare outputs with maps of classes."""
    if raw.shape[1:] == shape:
        return
    raise ValueError(
        f"The network gives outputs of shape {tuple(raw.shape[1:])} per row, but y has "
        f"{shape[0]} classes at positions {shape[1:]}, which take {shape}. Let the "
        "module return classes first and one logit for each position. For one label "
        "per row y should be a 1d array; for a matrix of labels that are 0 or 1 use "
        "criterion=torch.nn.BCEWithLogitsLoss."
    )


def _watched(net: Any, x: Any) -> tuple[Tensor, dict[str, int]]:
    """`raw_outputs`, and how much each module without children puts out."""
    sizes: dict[str, int] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, out: Any) -> None:
            sizes[name] = sizes.get(name, 0) + _numel(out)

        return hook

    handles = [
        module.register_forward_hook(note(name))
        for name, module in as_forward(net).module.named_modules()
        if not any(module.children())
    ]
    try:
        return raw_outputs(net, x), sizes
    finally:
        for handle in handles:
            handle.remove()


def _numel(out: Any) -> int:
    out = first_tensor(out)
    return out.numel() if isinstance(out, Tensor) else 1

"""OutputSpec: the likelihood of a skorch net, and the form of its outputs.

The criterion determines the likelihood, and which outputs the module should return.
Before training, the module's outputs for a few samples are checked. Contradictions
raise an error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from skorch import NeuralNet, NeuralNetClassifier
from torch import Tensor, nn

from sklaplace.core.budget import batch_rows
from sklaplace.core.checks import warn_user
from sklaplace.likelihoods import (
    CRITERIA,
    Bernoulli,
    CategoricalMap,
    ClassificationLikelihood,
    HeteroscedasticGaussian,
    Likelihood,
    MultilabelBernoulli,
    RegressionLikelihood,
)
from sklaplace.networks.forward import (
    Forward,
    apply_in_own_dtype,
    as_columns,
    first_tensor,
    logits_match,
    recorded_outputs,
    rounding,
    with_attributes,
)
from sklaplace.networks.net_checks import check_nonlinearity, check_one_module

LIKELIHOODS = "sklaplace.likelihoods"
# criterion arguments that change the likelihood, with their defaults
_OPTIONS = {"weight": None, "pos_weight": None, "label_smoothing": 0.0}
# built-in likelihoods, whose gradients need no check
_BUILT_IN = {type(likelihood) for likelihood, _ in CRITERIA.values()}
_BUILT_IN |= {CategoricalMap, MultilabelBernoulli}
# Number of copies of the outputs in memory at the same time, including the float64
# means, variances and probabilities computed from the outputs.
OUTPUT_COPIES = 14
LACKING = (
    "In cross-validation, use shuffled or stratified folds (StratifiedKFold). If other "
    "classes come later, begin with partial_fit(X, y, classes=...) of "
    "LaplaceClassifier."
)
ONE_CLASS = f"Pass samples of at least two classes. {LACKING}"
MEAN_AND_VARIANCE = "let the module return torch.cat([mean, variance.log()], 1)"


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """Likelihood, format and memory use of a network's outputs.

    Attributes
    ----------
    likelihood : Likelihood
        Likelihood of targets given outputs.
    output_map, logit_layer : str
        Arguments of `Forward`.
    n_outputs : int
        Number of outputs, c.
    row_bytes : int
        Bytes of memory per sample in a batch.
    has_two_softmaxes : bool
        Whether the criterion applies a softmax to outputs that are probabilities.
    output_shape : tuple of int or None
        Shape of the module's output for one sample.
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
        """Number of entries in a sample's output covariance, summed over blocks."""
        return self.n_outputs**2 // self.likelihood.n_blocks

    def batch_size(
        self, *, row_elements: int = 0, with_covariance: bool = False
    ) -> int:
        """Return the number of samples that fit into the memory budget, at least 1.

        Parameters
        ----------
        row_elements : int, default=0
            Additional float64 numbers per sample.
        with_covariance : bool, default=False
            Whether to reserve memory for three (c, c) float64 matrices: the output
            covariance, its centred form, and its square root.
        """
        covariances = 3 * self.covariance_size if with_covariance else 0
        return batch_rows(self.row_bytes + 8 * (row_elements + covariances))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside a `StochasticModule` or ``torch.compile``."""
    return getattr(module, "_orig_mod", module)


def as_forward(net: NeuralNet, spec: OutputSpec | None = None) -> Forward:
    """Convert a skorch net to a `Forward`, with the output map of ``spec`` if given.

    Without ``spec``, the result returns the module's outputs unchanged.
    """
    module = unwrapped(net.module_)
    # a net without the wrapper, because infer calls net.module_, and hooks work only on
    # the module inside
    bare = net if module is net.module_ else with_attributes(net, module_=module)
    is_binary = isinstance(unwrapped(net.criterion_), nn.BCELoss)
    # the inverse of a sigmoid or, up to a constant, of a softmax
    probability_map = "logit" if is_binary else "log"
    forward = Forward(module, bare.infer, probability_map=probability_map)
    if spec is not None:
        forward.output_map, forward.logit_layer = spec.output_map, spec.logit_layer
        forward.shape = spec.output_shape
    return forward


def measure_outputs(
    net: NeuralNet,
    x: object,
    allowed: tuple[type, ...],
    n_targets: int | None,
    is_trained: bool,
    likelihood: Likelihood | None = None,
    adapted: Callable[[Likelihood], Likelihood] = lambda likelihood: likelihood,
    other: str = "",
) -> tuple[OutputSpec, Tensor, dict[str, int]]:
    """Infer the meaning of a net's outputs from its criterion and a few samples.

    The criterion determines the likelihood, and whether the module returns logits or
    probabilities. The module is then applied once, and its outputs are checked. For
    probabilities, logits are read from the last linear layer if possible, because
    logarithms of probabilities lose digits. The sizes of all layers determine the
    memory per sample.

    Parameters
    ----------
    net : skorch.NeuralNet
        Initialised net, trained or not, frozen with ``Forward.frozen()``.
    x : batch
        Inputs of a few samples.
    allowed : tuple of types
        Likelihoods that the estimator supports.
    n_targets : int or None
        Number of classes or target columns, or None if unknown.
    is_trained : bool
        Whether the net is trained, for the error message about non-finite outputs.
    likelihood : Likelihood, optional
        Likelihood that replaces the criterion's likelihood. The module then returns the
        parameters of this likelihood.
    adapted : callable, optional
        Function that adapts the criterion's likelihood to the type of targets.
    other : str, optional
        Estimator that supports other criteria, for error messages.

    Returns
    -------
    spec : OutputSpec
        Likelihood, format and memory use of the outputs.
    raw : Tensor of shape (b,) or (b, c, ...)
        Outputs of the module for ``x``, before the output map.
    sizes : dict
        Number of output elements of each module without children, by name, for all
        samples of ``x`` together.

    Raises
    ------
    ValueError
        If the criterion or the outputs are not suitable.
    """
    has_criterion = likelihood is None
    if likelihood is None:
        likelihood, convention = _criterion_likelihood(net, allowed, adapted, other)
    else:  # without a criterion, outputs are used as they are
        likelihood, convention = adapted(likelihood), ""
    raw, calls_by_layer = _recorded_layers(net, x)
    check_one_module(net, x)
    _check_finite(raw, is_trained)
    _check_ignored(net, raw)
    if n_targets is not None:
        _check_width(raw, likelihood, n_targets)
    if has_criterion:
        check_nonlinearity(net, raw, likelihood)
    if type(likelihood) not in _BUILT_IN:
        _check_gradient(likelihood, raw)
    # a softmax over several classes, not a sigmoid per output
    sums_to_one = likelihood.is_shift_invariant and raw.ndim > 1 and raw.shape[1] > 1
    layer_outputs = [out for calls in calls_by_layer.values() for out in calls]
    # a few rounding errors of probabilities and of their logarithms
    tolerance = max(1e-4, 4 * rounding([raw, *layer_outputs]))
    output_map, logit_layer = "identity", None
    if convention == "probabilities":
        _check_probabilities(net, x, raw, sums_to_one, tolerance)
        logit_layer = _logit_layer(net, x, not sums_to_one, tolerance)
        if logit_layer is None:  # only the probabilities are known
            output_map = "log" if sums_to_one else "logit"
    expects_logits = convention == "logits" and sums_to_one
    sizes = {name: sum(map(_numel, calls)) for name, calls in calls_by_layer.items()}
    c = raw[0].numel()  # number of outputs per sample
    # without gradients, torch holds only the input and the output of one layer
    elements = 2 * max(sizes.values(), default=0) // len(raw) + OUTPUT_COPIES * c
    spec = OutputSpec(
        likelihood=likelihood,
        output_map=output_map,
        logit_layer=logit_layer,
        n_outputs=c,
        row_bytes=elements * raw.element_size(),
        # the supposed logits turn out to be probabilities
        has_two_softmaxes=expects_logits and _is_distribution(raw, True, tolerance),
        output_shape=tuple(raw.shape[1:]),
    )
    return spec, raw, sizes


_NO_PROBABILITIES = (
    "criterion={} needs a module that returns probabilities, because skorch takes "
    "the logarithm. This module returns logits or log-probabilities. End it with a "
    "softmax (or sigmoid), or use the criterion for logits: "
    "torch.nn.CrossEntropyLoss (or torch.nn.BCEWithLogitsLoss)."
)


_NO_LOGARITHMS = (
    "criterion={} needs a module that returns log-probabilities, because this net does "
    "not take the logarithm, unlike skorch.NeuralNetClassifier. End the module with "
    "log_softmax, or return logits with criterion=torch.nn.CrossEntropyLoss."
)


def takes_logarithm(net: NeuralNet, raw: Tensor, x: object = None) -> bool:
    """Return whether a net's loss takes the logarithm of the module's outputs.

    With `torch.nn.NLLLoss`, `skorch.NeuralNetClassifier` does, because it expects
    probabilities. Other nets expect log-probabilities, so that their loss is linear in
    the outputs. ``raw`` are outputs for a batch ``x``, of which only the shape matters.

    The loss is computed for outputs that all equal 1, 2 or 4. From 1 to 4, a linear
    loss changes three times as much as from 1 to 2, and a logarithm twice as much. If
    these losses cannot be compared, the net's class decides, as in skorch.
    """
    # without mixins for training, which change the loss; `training_run` keeps the
    # user's class as _original
    loss = getattr(net, "_original", type(net)).get_loss
    y = raw.argmax(1)  # any valid classes serve as targets
    constant_outputs = (torch.full_like(raw, value) for value in (1, 2, 4))
    try:
        one, two, four = (loss(net, outputs, y, X=x) for outputs in constant_outputs)
    except Exception:  # the user's method needs other outputs or targets
        return isinstance(net, NeuralNetClassifier)
    # zero weight of the class y makes a mean loss 0/0
    if not (four - one).isfinite():
        return isinstance(net, NeuralNetClassifier)
    # 2.5 lies between the ratios 2 and 3; both differences are negative
    return bool(four - one > 2.5 * (two - one))


def warn_if_double_softmax(net: NeuralNet, spec: OutputSpec) -> None:
    """Warn if the module returns probabilities but the criterion expects logits."""
    if spec.has_two_softmaxes:
        warn_user(
            "The module returns probabilities, but criterion="
            f"{type(net.criterion_).__name__} applies a second softmax. Remove the "
            "softmax from the module.",
        )


def warn_of_other_loss(net: NeuralNet, likelihood: Any, batch: Any) -> None:
    """Warn if a net's loss has gradients unlike those of the likelihood.

    Both gradients with respect to the outputs are computed for one batch ``(x, y,
    weights)``, and compared by their cosine similarity. A constant factor of the loss
    therefore makes no difference.
    """
    (x, y, _), forward = batch, as_forward(net)
    with forward.frozen(), torch.enable_grad():
        returned = forward.returned(x)
        raw = first_tensor(returned).requires_grad_()
        # a criterion would broadcast targets (b,) against outputs (b, 1)
        y = y.reshape(raw.shape) if y.numel() == raw.numel() else y
        f = as_columns(raw.detach()).double()
        targets = likelihood.targets(y, f)
        # class weights are part of the net's loss, but not of likelihood.gradient
        factors = likelihood.loss_scale(targets)  # (b,), or None for ones
        expected = likelihood.gradient(f, targets)
        expected = expected if factors is None else expected * factors.unsqueeze(1)
        try:
            loss = net.get_loss(returned, y, X=x, training=True)
            gradient = as_columns(torch.autograd.grad(loss, raw)[0]).to(f)
        except Exception:  # a loss that fails for these targets is not proportional
            gradient = torch.zeros_like(f)
    cosine = nn.functional.cosine_similarity(gradient.flatten(), expected.flatten(), 0)
    # at a perfect fit, there is no gradient to compare; 1e-4 allows for rounding errors
    # in float32, and "not >" also catches NaN
    if expected.any() and not cosine > 1 - 1e-4:
        criterion = type(unwrapped(net.criterion_)).__name__
        warn_user(
            f"The loss of the net, criterion={criterion}, and likelihood="
            f"{type(likelihood).__name__} have different gradients, so the trained "
            "weights do not maximise this likelihood. Train with a criterion that is "
            "proportional to the loss of the likelihood."
        )


def _criterion_likelihood(
    net: NeuralNet,
    allowed: tuple[type, ...],
    adapted: Callable[[Likelihood], Likelihood],
    other: str,
) -> tuple[Likelihood, str]:
    """Return the likelihood of a net's criterion, and what the module should return.

    The second value is the convention: "logits", "probabilities" or "mean". The
    likelihood is adapted to the targets and has the options of the criterion.
    Unsupported criteria and options raise an error. The parameters are described in
    `measure_outputs`.
    """
    criterion = unwrapped(net.criterion_)
    likelihood, convention = CRITERIA.get(type(criterion), (None, ""))
    if likelihood is None or not isinstance(likelihood, allowed):
        raise ValueError(_unsupported_criterion(criterion, likelihood, allowed, other))
    if getattr(criterion, "reduction", "mean") == "none":
        raise ValueError("criterion__reduction='none' returns no loss. Use 'mean'.")
    likelihood = adapted(likelihood)
    for option, default in _OPTIONS.items():
        value = getattr(criterion, option, default)
        # no default is a tensor, and tensors are compared entry by entry
        is_set = isinstance(value, Tensor) or value != default
        if is_set and option not in likelihood.options:
            raise ValueError(
                f"criterion__{option} is set, which changes the likelihood. Leave it "
                "at its default. To weight rows or classes, pass sample_weight to fit."
            )
        if isinstance(value, Tensor) and not (value.isfinite() & (value >= 0)).all():
            raise ValueError(
                f"criterion__{option} has negative or non-finite entries. Choose "
                "finite numbers of at least zero."
            )
    return likelihood.configured(criterion), convention


def _unsupported_criterion(
    criterion: Any, likelihood: Likelihood | None, allowed: tuple[type, ...], other: str
) -> str:
    """Return the error message for a criterion without a supported likelihood.

    ``likelihood`` is None for an unknown criterion, and otherwise belongs to a type
    that is not ``allowed``. The message ends with the advice that fits the case:
    another criterion, a custom likelihood, or the estimator ``other``.
    """
    criteria = ", ".join(
        sorted(
            f"{'torch.nn' if hasattr(nn, k.__name__) else LIKELIHOODS}.{k.__name__}"
            for k, (supported, _) in CRITERIA.items()
            if isinstance(supported, allowed)
        )
    )
    is_classifier = issubclass(allowed[0], ClassificationLikelihood)
    advice = f"Choose one of {criteria}"
    if isinstance(criterion, nn.GaussianNLLLoss) and not is_classifier:
        advice = f"Use {LIKELIHOODS}.HeteroscedasticNLLLoss, and {MEAN_AND_VARIANCE}"
    elif likelihood is None:
        base = ClassificationLikelihood if is_classifier else RegressionLikelihood
        advice += (
            "; or pass likelihood=, an instance of a custom class derived "
            f"from {LIKELIHOODS}.{base.__name__}"
        )
    elif other and likelihood.is_classification != is_classifier:
        advice += f"; or use {other}"
    return f"criterion={type(criterion).__name__} is not supported here. {advice}."


def raw_outputs(net: NeuralNet, x: object) -> Tensor:
    """Return the module's output for a few samples, (b,) or (b, c, ...).

    Errors say why the network cannot be used: it does not accept the inputs, or does
    not return a tensor.
    """
    of_shape = f" of shape {tuple(x.shape[1:])}" if isinstance(x, Tensor) else ""
    try:
        outputs = first_tensor(apply_in_own_dtype(as_forward(net), x))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"The network cannot be applied to rows{of_shape}: "
            f"{str(error).rstrip('.')}. Compare the size and type of its inputs with "
            "X; embedding layers need integers."
        ) from error
    if not isinstance(outputs, Tensor):
        raise TypeError(
            f"The network returns a {type(outputs).__name__}. Return a tensor, a tuple "
            "that starts with a tensor, or a mapping or an object with a tensor named "
            "logits."
        )
    return outputs.detach()


def match_axes(net: NeuralNet, x: object, y: Any) -> Any:
    """Return targets, with as many axes as the module's outputs if they are real.

    A criterion would broadcast (n,) against (n, 1) to (n, n), or raise an error. ``x``
    is a batch of a few samples, from which lazy modules infer their shapes.
    """
    # for any targets, because this first pass gives lazy modules their shapes
    with as_forward(net).frozen():
        n_axes = raw_outputs(net, x).ndim
    if not (isinstance(y, np.ndarray) and y.dtype.kind == "f"):
        return y
    if n_axes == 1 and y.shape[1:] == (1,):
        return y.ravel()
    return y.reshape(-1, 1) if n_axes == 2 and y.ndim == 1 else y


def check_repeatable(net: NeuralNet, x: object) -> None:
    """Raise ValueError if two passes over the same samples return different outputs."""
    with as_forward(net).frozen():
        raw, again = raw_outputs(net, x), raw_outputs(net, x)
    gap, largest = float((raw - again).abs().max()), float(raw.abs().max())
    # parallel sums may differ by rounding errors, of which 4 or 1e-4 are allowed
    if gap > max(1e-4, 4 * rounding([raw])) * largest:
        raise ValueError(
            "The network's outputs are random in evaluation mode: two passes over the "
            f"same rows differ by up to {gap:.2g}. Draw numbers only in training mode, "
            "as torch.nn.functional.dropout(h, p, self.training) does. To draw in "
            "predictions, use MCDropoutClassifier or MCDropoutRegressor."
        )


def _recorded_layers(net: NeuralNet, x: object) -> tuple[Tensor, dict[str, list[Any]]]:
    """Return `raw_outputs` for a batch, and the outputs of all layers by name.

    Layers are modules without children. Their outputs are lists with one tensor per
    call. The tensors have shapes but no values, because the layer outputs of large
    networks would occupy gigabytes.
    """
    module = as_forward(net).module
    layers = [name for name, m in module.named_modules() if not any(m.children())]
    with recorded_outputs(module, layers, _without_values) as calls_by_layer:
        return raw_outputs(net, x), calls_by_layer


def _without_values(out: object) -> object:
    """Keep only the shape and dtype of a module's outputs."""
    output = first_tensor(out)
    return output.to("meta") if isinstance(output, Tensor) else output


def _numel(out: object) -> int:
    return out.numel() if isinstance(out, Tensor) else 1


def _check_finite(raw: Tensor, is_trained: bool) -> None:
    """Raise ValueError for non-finite outputs; the advice depends on the training."""
    if raw.isfinite().all():
        return
    if is_trained:
        raise ValueError(
            "The network's outputs are not finite: its training has diverged, or its "
            "weights were not loaded. Lower the learning rate, or scale the inputs."
        )
    raise ValueError(
        "The outputs of the untrained network are not finite for the first rows of X. "
        "Scale the inputs (StandardScaler in a Pipeline)."
    )


def _check_ignored(net: NeuralNet, raw: Tensor) -> None:
    """Raise ValueError if the criterion ignores the label of one of the outputs."""
    # -1 stands for criteria without the option, and is no output
    index = getattr(unwrapped(net.criterion_), "ignore_index", -1)
    if raw.ndim > 1 and 0 <= index < raw.shape[1]:
        raise ValueError(
            f"criterion__ignore_index={index} is the number of a class, because the "
            f"network returns {raw.shape[1]} outputs. Use a negative number, such as "
            "-1, to label the rows to ignore."
        )


def _check_probabilities(
    net: NeuralNet, x: object, raw: Tensor, sums_to_one: bool, tolerance: float
) -> None:
    """Raise ValueError unless outputs are the probabilities that a loss expects.

    A softmax loss that does not take the logarithm expects log-probabilities.
    """
    expects_logs = sums_to_one and not takes_logarithm(net, raw, x)
    p = raw.exp() if expects_logs else raw
    if not _is_distribution(p, sums_to_one, tolerance):
        message = _NO_LOGARITHMS if expects_logs else _NO_PROBABILITIES
        raise ValueError(message.format(type(net.criterion_).__name__))


def _is_distribution(raw: Tensor, sums_to_one: bool, tolerance: float) -> bool:
    """Return whether outputs lie in [0, 1] and, if required, sum to one."""
    if not ((raw >= 0) & (raw <= 1)).all():
        return False
    if not sums_to_one:
        return True
    total = raw.sum(1)
    return torch.allclose(total, torch.ones_like(total), atol=tolerance)


def _logit_layer(
    net: NeuralNet, x: object, is_binary: bool, tolerance: float
) -> str | None:
    """Return the name of the last linear layer if it returns the logits, else None.

    The outputs of the layer are the logits if they imply the probabilities that the
    module returns, for all samples of ``x``.
    """
    module = as_forward(net).module
    linear = [name for name, m in module.named_modules() if isinstance(m, nn.Linear)]
    with recorded_outputs(module, linear[-1:]) as recorded:
        raw = raw_outputs(net, x)
    for name, calls in recorded.items():  # at most one layer
        # with more axes, linear layers have classes last, and the module has them first
        if len(calls) == 1 and calls[0].numel() == raw.numel() and raw.ndim <= 2:
            logits = calls[0].reshape(raw.shape)
            if logits_match(logits, raw, is_binary, tolerance).all():
                return name
    return None


def _check_gradient(likelihood: Likelihood, raw: Tensor) -> None:
    """Raise ValueError for a likelihood whose gradient contradicts its loss.

    For drawn targets, the method ``gradient`` is compared with the gradient of ``loss``
    by autograd.
    """
    f = raw.detach().double().reshape(len(raw), -1)
    # a different quantile for each sample, so that targets are not all typical
    u = torch.linspace(0.05, 0.95, len(f), dtype=f.dtype, device=f.device)
    y = likelihood.draw(f, u.unsqueeze(1).expand(-1, likelihood.n_draws(f.shape[1])))
    try:
        with torch.enable_grad():
            leaf = f.clone().requires_grad_()
            # autograd forbids changes of a leaf in place, which a loss may make
            loss = likelihood.loss(leaf.clone(), y).sum()
            (expected,) = torch.autograd.grad(loss, leaf)
    except RuntimeError as cause:
        raise ValueError(
            f"The loss of {type(likelihood).__name__} cannot be differentiated: "
            f"{cause}. Compute the loss from f with torch functions."
        ) from cause
    # both are float64, and a method may use other formulas; "not <=" also catches NaN
    error = (likelihood.gradient(f, y) - expected).abs().max()
    if not error <= 1e-6 * (1 + expected.abs().max()):
        raise ValueError(
            f"The gradient of {type(likelihood).__name__} contradicts its loss: it is "
            f"off by {float(error):.2g}. Compare likelihood.gradient with automatic "
            "differentiation of likelihood.loss."
        )


def _check_map(raw: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError if outputs are a map but targets are not, or vice versa.

    ``shape`` is the expected output shape of one sample: ``(classes, *positions)`` for
    labels at positions, or ``(outputs,)``. Two maps must also have equal shapes. The
    message names the likely cause, such as classes on the last axis. The width of an
    output vector is left to `_check_width`.
    """
    classes_last = (*shape[1:], shape[0])
    if len(shape) > 1 and raw.shape[1:] == classes_last != shape:
        move = "transpose(1, 2)" if raw.ndim == 3 else "movedim(-1, 1)"
        raise ValueError(
            f"The network returns outputs of shape {classes_last} per row, with "
            f"classes last, but the criterion expects classes first: {shape}. Wrap "
            f"the module in one that returns logits.{move}."
        )
    if len(shape) > 1 and raw.shape[1:] != shape:
        positions, hint = tuple(raw.shape[2:]), ""
        # The likely causes are one-hot labels (read as positions), classes that y
        # lacks, or an additional axis of length one in y.
        if raw.shape[1:] == shape[1:]:
            hint = " If y is one-hot, pass y.argmax(axis=1)."
        elif positions == shape[1:] and raw.shape[1] > shape[0]:
            hint = f" {LACKING}"
        elif [n for n in positions if n > 1] == [n for n in shape[1:] if n > 1]:
            hint = (
                f" Remove the axis of length one from y: y.reshape{(-1, *positions)}."
            )
        raise ValueError(
            f"The network returns outputs of shape {tuple(raw.shape[1:])} per row, but "
            f"y has {shape[0]} classes at positions {shape[1:]}, which need {shape}."
            f"{hint} For one label per row, y should be a 1d array. For a matrix of "
            "labels that are 0 or 1, use skorch.NeuralNet with "
            "criterion=torch.nn.BCEWithLogitsLoss. For a label at each position, the "
            "module should return classes first and one logit for each position."
        )
    if len(shape) == 1 and raw.ndim > 2:
        raise ValueError(
            f"The network returns outputs of shape {tuple(raw.shape[1:])} per row, but "
            "these targets need one vector per row. Flatten the outputs in the module. "
            "For a class at every position, pass y of shape "
            f"{('n', *raw.shape[2:])} with criterion=torch.nn.CrossEntropyLoss."
        )


def _check_width(raw: Tensor, likelihood: Likelihood, n_targets: int) -> None:
    """Raise ValueError if the number of outputs does not match the targets.

    ``raw`` has the module's outputs for a few samples, and ``n_targets`` is the number
    of classes, labels or target columns. The message says how to change the last layer,
    the criterion or the data.
    """
    shape = likelihood.output_shape(n_targets)
    _check_map(raw, shape)
    if len(shape) > 1:  # a map, whose whole shape was checked
        return
    width, needed = raw[0].numel(), likelihood.n_outputs(n_targets)
    is_binary = isinstance(likelihood, Bernoulli)
    # the single logit of a binary likelihood cannot describe more than two classes
    if width == needed and not (is_binary and n_targets > 2):
        return
    noun, plural = likelihood.noun, "es" if likelihood.noun == "class" else "s"
    counted = f"{n_targets} {noun}{plural if n_targets != 1 else ''}"
    raise ValueError(
        f"The network returns {width} output{'s' if width != 1 else ''}, but y has "
        f"{counted}. {_width_advice(likelihood, width, n_targets)}"
    )


def _width_advice(likelihood: Likelihood, width: int, n_targets: int) -> str:
    """Return advice for a last layer whose width does not suit the targets.

    Usually, the layer is wrong. However, classes can be missing from y, for instance
    from a fold of cross-validation. More than two classes can need another criterion.
    """
    needed = likelihood.n_outputs(n_targets)
    advice = f"Set the size of its last layer to {needed}."
    if isinstance(likelihood, Bernoulli) and n_targets > 1:
        return (
            "For two classes, set the size of the last layer to 1. "
            "For more classes, use skorch.NeuralNetClassifier with "
            f"criterion=torch.nn.CrossEntropyLoss and a last layer of size {n_targets}."
        )
    if isinstance(likelihood, HeteroscedasticGaussian):
        return f"{advice} For mean and variance, {MEAN_AND_VARIANCE}."
    if likelihood.noun == "class" and n_targets == 1:
        return ONE_CLASS
    if likelihood.noun == "class" and width > needed:
        return f"{LACKING} Otherwise, set the size of its last layer to {needed}."
    return advice

"""PredictiveModule: predictions of a fitted estimator as a plain torch module."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from skorch import NeuralNet, NeuralNetBinaryClassifier
from torch import Tensor, nn

from sklaplace.core.trees import Batch, mapped_tensors
from sklaplace.curvature.jacobian import Centring
from sklaplace.curvature.layout import Head, Layout
from sklaplace.curvature.recorder import first_input
from sklaplace.curvature.shared import IdentityMap
from sklaplace.estimators.predicting.closed_forms import (
    Affine,
    Classes,
    Numbers,
    QuadraticForm,
    exported_residual,
)
from sklaplace.estimators.predicting.glm_outputs import GLMOutputs
from sklaplace.estimators.predicting.output_model import BatchedOutputs, OutputModel
from sklaplace.estimators.predicting.residual_outputs import ResidualOutputs
from sklaplace.networks.outputs import unwrapped
from sklaplace.networks.tabular import TabularNetwork
from sklaplace.networks.training import copied
from sklaplace.noise.residuals import Predictions
from sklaplace.novelty.residual import Residual, relative_variance

_INPUTS: ContextVar[list[Tensor]] = ContextVar("inputs of the last layer")


def _note(_: nn.Module, args: Any, kwargs: Any) -> None:
    """Record the inputs of the last layer during a call of a `PredictiveModule`."""
    _INPUTS.get([]).append(first_input(args, kwargs))


@dataclass(frozen=True)
class Parts:
    """Functions that a `PredictiveModule` combines.

    Attributes
    ----------
    outputs, mean : Affine
        Outputs of the network, and means of the outputs under the posterior.
    variance : QuadraticForm
        Variances of the outputs under the posterior.
    covariance : QuadraticForm or None
        Covariances, or variances of centred outputs; None if ``variance`` is
        sufficient.
    residual : Residual or None
        Residual of the outputs; see `exported_residual`.
    result : Classes or Numbers
        Function of the Gaussian over outputs.
    n_blocks : int
        Number of blocks of outputs; see `OutputModel.gaussian`.
    is_centred : bool
        Whether ``covariance`` refers to centred outputs.
    takes_rows : bool
        Whether the inputs are an array of two or more axes.
    """

    outputs: Affine
    mean: Affine
    variance: QuadraticForm
    covariance: QuadraticForm | None
    residual: Residual | None
    result: Classes | Numbers
    n_blocks: int
    is_centred: bool
    takes_rows: bool


class PredictiveModule(nn.Module):
    """Closed-form predictions of a fitted estimator, always in evaluation mode.

    Parameters
    ----------
    network : nn.Module
        Trained network.
    layer : str
        Name of the last layer of the network.
    parts : Parts
        Functions of the layer's inputs. The tensors of these functions become buffers.
    """

    def __init__(self, network: nn.Module, layer: str, parts: Parts) -> None:
        super().__init__()
        self.network = network.eval().requires_grad_(False)
        add_hook = network.get_submodule(layer).register_forward_pre_hook
        add_hook(_note, with_kwargs=True)

        def placed(tensor: Tensor | nn.Module) -> Tensor | nn.Module:
            """Convert a tensor to a buffer, and return a placeholder."""
            if isinstance(tensor, nn.Module):  # of a likelihood
                return tensor
            n_buffers = len(list(self.buffers(recurse=False)))
            self.register_buffer(f"value_{n_buffers}", tensor.detach().clone())
            return tensor.new_empty(0)

        # as buffers, the tensors move between devices; `forward` puts them back
        self.parts = mapped_tensors(placed, parts)
        super().train(False)  # the module's own `train` ignores the mode

    def _apply(self, fn: Any, recurse: bool = True) -> "PredictiveModule":
        """Apply a conversion, but keep the tensors of the closed forms in float64.

        Torch calls this method for ``to``, ``float`` and ``cuda``, for example. Only
        the new device of the closed forms is kept.
        """
        float64_buffers = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in float64_buffers.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    def train(self, mode: bool = True) -> "PredictiveModule":
        """Stay in evaluation mode, and ignore ``mode``."""
        return self

    def forward(self, x: Batch) -> tuple[Tensor, ...]:
        """Return the predictions for a batch; see ``to_module``.

        One pass yields the features. The moments of the outputs follow, to which the
        residual is added.
        """
        # the buffers replace the placeholders in the order in which these were made
        tensors = self.buffers(recurse=False)
        parts = mapped_tensors(
            lambda part: part if isinstance(part, nn.Module) else next(tensors),
            self.parts,
        )
        if parts.takes_rows and isinstance(x, Tensor) and x.ndim == 1:
            raise ValueError(
                f"x has shape {tuple(x.shape)}. Pass rows (n, ...), such as x[None]."
            )
        features = self._features(x)
        mean, variance = parts.mean(features), parts.variance(features)
        cov = variance if parts.covariance is None else parts.covariance(features)
        # the variances and the covariances each get the residual's variance
        if parts.residual is not None:
            residual, f = parts.residual, parts.outputs(features)
            batch = residual.novelty.batch(features, f, x)
            log_ratios = residual.log_ratios(batch, f)
            relative = relative_variance(log_ratios, residual.steepness)
            amplitudes = residual.amplitudes
            variance = amplitudes.added(variance, relative)
            cov = amplitudes.added(
                cov, relative, parts.n_blocks, centred=parts.is_centred
            )
        return parts.result(Predictions.of(features, x, mean, variance), cov)

    def _features(self, x: Batch) -> Tensor:
        """Return the last layer's inputs (b, i), float64, in a pass of the network.

        The hook `_note` records them in a list, which the context variable `_INPUTS`
        holds only during this pass, so that concurrent calls do not mix.
        """
        noted: list[Tensor] = []
        token = _INPUTS.set(noted)
        try:
            self.network(**x) if isinstance(x, dict) else self.network(x)
        finally:
            _INPUTS.reset(token)
        return noted[0].double()

    @classmethod
    def of(
        cls,
        predictions: BatchedOutputs,
        result: Classes | Numbers,
        *,
        n_inputs: int,
        diagonal: bool,
        is_centred: bool,
    ) -> "PredictiveModule":
        """Return the module, or raise ValueError if the outputs have no closed form.

        Closed forms require a linearised network whose selected weights are those of a
        last Linear layer.

        Parameters
        ----------
        predictions : BatchedOutputs
            Outputs of the fitted estimator.
        result : Classes or Numbers
            Function of the Gaussian over outputs.
        n_inputs : int
            Number of columns of X, or zero if X is not an array.
        diagonal : bool
            Whether ``result`` takes variances instead of covariances.
        is_centred : bool
            Whether ``result`` takes moments of centred outputs.
        """
        net, residual = predictions.network.net, None
        # a residual is added to the outputs of an inner model
        model: OutputModel = predictions.model
        if isinstance(model, ResidualOutputs):
            residual, model = model.residual, model.inner
        if not isinstance(model, GLMOutputs):
            raise ValueError("to_module needs pred_type='glm', which has closed forms.")
        posterior, layout = model.posterior, model.posterior.layout
        if layout.head is None:
            raise ValueError(
                "to_module needs subset_of_weights='last_layer', and a last layer of "
                "type torch.nn.Linear whose outputs are the outputs of the network."
            )
        if type(net).infer not in (NeuralNet.infer, NeuralNetBinaryClassifier.infer):
            raise ValueError(
                f"The net is a {type(net).__name__} with its own infer, which "
                "to_module would leave out. Move infer's code into the net's module."
            )
        network = unwrapped(copied(net).module_)
        if isinstance(network, TabularNetwork) and len(network.center) != n_inputs:
            raise ValueError(
                "to_module cannot encode the strings, categories or missing values of "
                "the data frame passed to fit. Encode the columns in a Pipeline, with "
                "OneHotEncoder and SimpleImputer, and export its last step."
            )
        # all blocks, such as weight and bias, belong to the last layer
        layer = str(layout.blocks[0].layer)
        outputs, mean = (
            _affine(layout, network.get_submodule(layer), weights)
            for weights in (posterior.weights, posterior.mean)
        )
        n_blocks = posterior.likelihood.n_blocks
        centring = Centring(n_blocks) if is_centred else None
        variance = QuadraticForm.of(posterior, None, diagonal=True)
        covariance = None
        if is_centred or not diagonal:
            covariance = QuadraticForm.of(posterior, centring, diagonal=diagonal)
        parts = Parts(
            outputs=outputs,
            mean=mean,
            variance=variance,
            covariance=covariance,
            residual=None if residual is None else exported_residual(residual),
            result=result,
            n_blocks=n_blocks,
            is_centred=is_centred,
            takes_rows=n_inputs > 0,
        )
        return cls(network, layer, parts).to(predictions.network.device)


def _affine(layout: Layout, layer: Any, weights: Tensor) -> Affine:
    """Return outputs as a function of the inputs of the last layer.

    ``weights`` (P,) replace the weight, the bias or both, whichever is selected. An
    affine map, the `Head`, leads from the layer's outputs to the network's outputs.
    """
    head, bias = cast(Head, layout.head), layer.bias
    weight = layer.weight.double()
    bias = weight.new_zeros(len(weight)) if bias is None else bias.double()
    for block, values in zip(layout.blocks, layout.split(weights), strict=True):
        if block.is_bias:
            bias = values
        else:
            weight = values.reshape(weight.shape)
    if isinstance(head.matrix, IdentityMap):
        return Affine(weight.detach(), bias.detach())
    matrix = head.matrix.to(weight)
    return Affine(matrix @ weight, matrix @ bias + head.offset.to(weight))

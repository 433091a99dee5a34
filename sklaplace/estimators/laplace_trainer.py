"""LaplaceTrainer: training of a network for a Laplace approximation.

Samples are held out where a tuner uses them, the specification of the network includes
its Jacobian, and single weights are selected once it has been trained.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sklaplace.core.budget import require_bytes
from sklaplace.curvature.network import NetworkSpec, infer_network_spec
from sklaplace.curvature.subnetwork import SelectionProblem, choose
from sklaplace.curvature.subsets import CRITERION, select
from sklaplace.estimators.options import (
    LaplaceOptions,
    check_earlier_layout,
    check_layout,
)
from sklaplace.estimators.trainer import Trainer
from sklaplace.networks import split
from sklaplace.networks.data import TrainingData, first_rows
from sklaplace.networks.trained import TrainedNetwork, device_of


@dataclass(kw_only=True)
class LaplaceTrainer(Trainer):
    """Trains a skorch net for a Laplace approximation.

    Attributes
    ----------
    options : LaplaceOptions
        Options of the approximation.
    """

    options: LaplaceOptions

    def train(
        self,
        data: TrainingData,
        validation: TrainingData | None,
        fit_params: dict[str, Any],
    ) -> TrainedNetwork:
        """Return the trained network with the samples it has and has not seen."""
        trained = super().train(data, validation, fit_params)
        if not self._selects_weights:
            return trained
        options = {"indices": self._selected_weights(trained)}
        spec = self.infer_spec(
            trained.net, trained.train, is_trained=True, options=options
        )
        return replace(trained, spec=spec)

    def require_no_held_out(self) -> None:
        """Raise, before training, if the tuner requires held-out samples."""
        reason = "the network is frozen, so that only you know what it has seen"
        if not self.is_frozen:
            reason = f"fewer than {split.MIN_ROWS} distinct rows are too few to share"
        if self.options.tuner == "validation":
            raise ValueError(
                "'validation' needs rows that the network did not see, and there are "
                f"none: {reason}. Pass X_val and y_val to fit, or use "
                "prior_precision='marglik'."
            )

    # ----------------------------------------------------------------- subnetworks
    @property
    def _selects_weights(self) -> bool:
        """Whether single weights are selected by the trained network."""
        # a list of names is compared with a name, and is not equal
        is_subnetwork = self.options.subset_of_weights == "subnetwork"
        return is_subnetwork and "indices" not in self.options.subset_params

    def _selected_weights(self, trained: TrainedNetwork) -> Tensor:
        """Return the indices of the weights with the largest scores."""
        forward = trained.forward()
        with forward.frozen():
            layout = select(forward, first_rows(trained.net, trained.train), "all", {})
            batch_size = self.options.batch_size
            elements = self.options.row_elements(trained.spec)
            batches = partial(
                trained.batches, trained.train, batch_size, row_elements=elements
            )
            likelihood = trained.spec.likelihood
            problem = SelectionProblem(forward, layout, likelihood, batches, self.seed)
            by = self.options.subset_params.get("by", CRITERION)
            return choose(problem, by, trained.spec.layout.n_parameters)

    # --------------------------------------------------------------- specification
    def infer_spec(
        self,
        net: Any,
        dataset: Any,
        *,
        is_trained: bool,
        options: dict[str, Any] | None = None,
    ) -> NetworkSpec:
        """Return the meaning of outputs, and the layout; raises for what is invalid."""
        spec = infer_network_spec(
            net,
            first_rows(net, dataset),
            self.options.subset_of_weights,
            options=options or self.options.subset_params,
            **self.spec_options(is_trained),
        )
        device = device_of(net)
        n_rows, n_columns = len(dataset) * spec.n_outputs, spec.n_outputs
        check_layout(self.options, spec.layout, device, n_rows, n_columns)
        check_earlier_layout(self.options.prior, spec.layout)
        if self.options.may_refit and spec.head_map is not None:
            _check_refit_bytes(spec, len(dataset), device)
        if self.options.refine is True:
            self._check_refine(spec)
        return spec

    def _check_refine(self, spec: NetworkSpec) -> None:
        """Raise where the weights cannot be refitted."""
        if spec.head_map is None and self.options.pred_type == "nn":
            raise ValueError(
                "refine=True cannot be used with pred_type='nn' here: the weights that "
                "it finds are those of the linearised network. Use pred_type='glm', or "
                "subset_of_weights='last_layer' with a network that ends in a Linear "
                "layer."
            )
        if not spec.likelihood.is_convex:
            raise ValueError(
                "refine=True needs a loss that is convex in the outputs, which "
                f"that of {type(spec.likelihood).__name__} is not. Use "
                "refine=False."
            )


def _check_refit_bytes(spec: NetworkSpec, n_rows: int, device: torch.device) -> None:
    """Raise if the samples for refitting do not fit into memory."""
    n_inputs = spec.layout.blocks[0].factor_shape[1]
    # inputs in float64 and in the dtype of the network; outputs, gradients and
    # intermediate results of a step
    per_row = 16 * n_inputs + 6 * 8 * spec.n_outputs
    require_bytes(
        per_row * n_rows,
        device,
        f"refitting the last layer on {n_rows:,} rows",
        "use refine=False, or fewer rows",
    )

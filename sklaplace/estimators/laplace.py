"""LaplaceFitter: training as a Laplace approximation wants it.

Rows are held out where a tuner asks for them, the network is read together with its
Jacobian, and single weights are chosen once it has been trained.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from sklaplace.core.budget import require_bytes
from sklaplace.curvature.network import NetworkSpec, infer_network_spec
from sklaplace.curvature.subnetwork import SelectionProblem, choose
from sklaplace.curvature.subsets import CRITERION, select
from sklaplace.estimators.fitting import NetworkFitter
from sklaplace.estimators.outputs import TrainedNetwork, device_of
from sklaplace.estimators.prediction import PosteriorPredictor
from sklaplace.estimators.settings import (
    check_earlier_layout,
    check_layout,
    check_settings,
)
from sklaplace.networks import split
from sklaplace.networks.data import TrainingData, first_rows


class LaplaceFitter(NetworkFitter, PosteriorPredictor):
    """Settings of a Laplace approximation and the network for it."""

    prior: Any = None
    prior_precision: Any
    refine: Any
    subset_of_weights: Any
    subset_params: dict[str, Any] | None

    # ------------------------------------------------------------------ settings
    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_settings(self)

    def _tuners(self) -> list[str]:
        """Names of the tuners asked for, the more specific ones first.

        None under an earlier posterior, which says all of the prior.
        """
        if self.prior is not None:
            return []
        values = [self.prior_precision, self._sigma_noise()]
        names = {value for value in values if isinstance(value, str)}
        return sorted(names, key=lambda name: name == "auto")

    def _sigma_noise(self) -> Any:
        """Noise setting; one where the likelihood has none."""
        return 1.0

    def _tunes_on_rows(self) -> bool:
        return bool(self._tuners()) and self._tuners()[0] in ("auto", "validation")

    def _refine(self) -> bool | Literal["auto"]:
        """The setting as it is compared with: numpy's flags are not True or False."""
        return "auto" if self.refine == "auto" else bool(self.refine)

    def _may_refit(self) -> bool:
        """Whether anything can ask for another last layer."""
        refine = self._refine()
        return refine is True or (refine == "auto" and bool(self._tuners()))

    def _require_no_rows(self) -> None:
        """Refuse, before training, a tuner whose rows are not there."""
        reason = "the network is frozen, so that only you know what it has seen"
        if not self._is_frozen():
            reason = f"fewer than {split.MIN_ROWS} distinct rows are too few to share"
        if self._tuners()[:1] == ["validation"]:
            raise ValueError(
                "'validation' needs rows that the network did not see, and there are "
                f"none: {reason}. Pass X_val and y_val to fit, or use "
                "prior_precision='marglik'."
            )

    # ---------------------------------------------------------------- the network
    def _fit_network(
        self,
        data: TrainingData,
        validation: TrainingData | None,
        fit_params: dict[str, Any],
    ) -> TrainedNetwork:
        fitted = super()._fit_network(data, validation, fit_params)
        if not self._chooses_weights():
            return fitted
        options = {"indices": self._chosen_weights(fitted)}
        inspected = self._inspect(
            fitted.net, fitted.train, is_trained=True, options=options
        )
        return replace(fitted, inspected=inspected)

    def _chooses_weights(self) -> bool:
        """Whether the training decides which single weights are random."""
        is_subnetwork = isinstance(self.subset_of_weights, str) and (
            self.subset_of_weights == "subnetwork"
        )
        return is_subnetwork and "indices" not in (self.subset_params or {})

    def _chosen_weights(self, fitted: TrainedNetwork) -> Tensor:
        """Places of the weights that the criterion prefers."""
        options = self.subset_params or {}
        forward = fitted.forward()
        with forward.frozen():
            layout = select(forward, first_rows(fitted.net, fitted.train), "all", {})
            problem = SelectionProblem(
                forward,
                layout,
                fitted.inspected.likelihood,
                lambda: self._batches(fitted, fitted.train),
                self._seed,
            )
            by = options.get("by", CRITERION)
            return choose(problem, by, fitted.inspected.layout.n_parameters)

    def _inspect(
        self,
        net: Any,
        dataset: Any,
        *,
        is_trained: bool,
        options: dict[str, Any] | None = None,
    ) -> NetworkSpec:
        """Read the net's conventions and refuse what does not fit."""
        inspected = infer_network_spec(
            net,
            first_rows(net, dataset),
            self.subset_of_weights,
            options=options or self.subset_params,
            **self._meaning(is_trained),
        )
        n_columns = inspected.n_outputs
        size = len(dataset) * n_columns, n_columns
        check_layout(self, inspected.layout, device_of(net), *size)
        check_earlier_layout(self.prior, inspected.layout)
        if self._may_refit() and inspected.head_map is not None:
            self._check_head_rows(inspected, len(dataset), device_of(net))
        is_bent = self._refine() is True and inspected.head_map is None
        if is_bent and self.pred_type == "nn":
            raise ValueError(
                "refine=True cannot be used with pred_type='nn' here: the weights that "
                "it finds are those of the linearised network. Use pred_type='glm', or "
                "subset_of_weights='last_layer' with a network that ends in a Linear "
                "layer."
            )
        if self._refine() is True and not inspected.likelihood.is_convex:
            raise ValueError(
                "refine=True needs a loss that is convex in the outputs, which "
                f"that of {type(inspected.likelihood).__name__} is not. Use "
                "refine=False."
            )
        return inspected

    def _check_head_rows(
        self, inspected: NetworkSpec, n_rows: int, device: torch.device
    ) -> None:
        """Refuse to keep more rows for refitting than memory holds."""
        n_inputs = inspected.layout.blocks[0].factor_shape[1]
        # as they come, in float64 and in the dtype of the network; outputs, gradients
        # and what a step makes of them
        per_row = 16 * n_inputs + 6 * 8 * inspected.n_outputs
        require_bytes(
            per_row * n_rows,
            device,
            f"refitting the last layer on {n_rows:,} rows",
            "use refine=False, or fewer rows",
        )

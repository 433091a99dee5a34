"""NetworkFitter: the part of the estimators that takes rows and trains the network.

Rows are checked and cast, some may be held out, the network is trained unless it is
frozen, and what it means is read from a few rows, before and after the training.
"""

import os
import warnings
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import clone
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    validate_data,
)
from torch import Tensor

from sklaplace import holdout
from sklaplace.data import (
    InputType,
    TrainingData,
    check_length,
    input_type,
    is_opaque,
)
from sklaplace.inspection import (
    Inspected,
    inspect,
    raw_outputs,
    view,
    warn_if_double_softmax,
)
from sklaplace.likelihoods import Likelihood
from sklaplace.memory import require_bytes
from sklaplace.options import (
    listed,
)
from sklaplace.prediction import FittedNetwork, PosteriorPredictor, device_of
from sklaplace.settings import (
    check_earlier_layout,
    check_layout,
    check_settings,
    inner_net,
    is_frozen,
)
from sklaplace.subnetworks import Question, choose
from sklaplace.subsets import CRITERION, select
from sklaplace.training import copied, first_rows, train


class NetworkFitter(PosteriorPredictor):
    """Rows and settings in, a `FittedNetwork` out; not for direct use."""

    _likelihoods: tuple[type, ...]
    likelihood: Any
    prior: Any = None

    # ------------------------------------------------------------------ settings
    def _check_parameters(self) -> None:
        check_settings(self)

    def _is_frozen(self) -> bool:
        return is_frozen(self.estimator)

    def _net(self) -> Any:
        return inner_net(self.estimator)

    def _fresh_random_state(self) -> np.random.RandomState:
        """Never the global generator: None draws on the operating system."""
        if self.random_state is None:
            return np.random.RandomState(int.from_bytes(os.urandom(4), "little"))
        given: np.random.RandomState = check_random_state(self.random_state)
        return given

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

    # ------------------------------------------------------------------- the data
    def _check_data(
        self, X: Any, y: Any, sample_weight: Any, X_val: Any, y_val: Any
    ) -> tuple[TrainingData, TrainingData | None]:
        if (X_val is None) != (y_val is None):
            missing = "y_val" if y_val is None else "X_val"
            raise ValueError(
                f"{missing} is missing: rows to tune on need inputs and targets. "
                "Pass both X_val and y_val, or neither."
            )
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is "
                "None. For a torch Dataset, pass its targets as an array."
            )
        self._input_type: InputType = input_type(self._net())
        data = self._weighted(self._checked(X, y, reset=True), sample_weight)
        if X_val is None:
            return data, None
        validation = self._checked(X_val, y_val, reset=False, name="y_val")
        return data, self._weighted(validation, None)

    def _weighted(self, data: TrainingData, sample_weight: Any) -> TrainingData:
        """The rows with weights, if there are any; those of weight zero are dropped."""
        own = self._own_weights(data.y)
        if sample_weight is None:
            return data if own is None else data.weighted(own)
        weights = _check_sample_weight(
            sample_weight,
            np.empty((len(data.y), 1)),
            dtype=np.float64,
            ensure_non_negative=True,
        )
        return data.weighted(weights if own is None else weights * own)

    def _own_weights(self, y: np.ndarray) -> np.ndarray | None:
        """Weights that targets have by themselves, (n,); overridden for labels."""
        return None

    def _checked(self, X: Any, y: Any, *, reset: bool, name: str = "y") -> TrainingData:
        """Validated arrays; datasets and dicts as they are; targets encoded."""
        if is_opaque(X):
            y = np.asarray(y)
            check_length(X, y)
            if reset:  # what an earlier fit on arrays has left
                for name in ("n_features_in_", "feature_names_in_"):
                    self.__dict__.pop(name, None)
        else:
            X, y = self._validated(X, y, reset=reset)
            X = self._input_type.inputs(X)
        return TrainingData(X, self._encode(y, reset=reset, name=name), None)

    def _validated(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        """Rows and targets as scikit-learn's checks leave them."""
        X, y = validate_data(
            self, X, y, reset=reset, dtype=None, allow_nd=True, **self._target_options
        )
        return X, y

    # ---------------------------------------------------------------- the network
    def _fit_network(
        self,
        data: TrainingData,
        validation: TrainingData | None,
        fit_params: dict[str, Any],
    ) -> FittedNetwork:
        """The trained net, and which rows it has and has not seen."""
        net = self._new_net(data)
        if validation is None and not self._is_frozen() and not net.train_split:
            data, validation = self._hold_out(data)
        if validation is None and (self._is_frozen() or not net.train_split):
            self._require_no_rows()
        if self._is_frozen():
            if fit_params:
                raise TypeError(
                    f"fit got the unknown arguments {listed(fit_params)}. They would "
                    "go to the training of the network, but this one is frozen."
                )
            self._check_targets(net, data.y)
            seen, held_out = data.dataset(net), None
        else:
            seen, held_out = self._train(net, data, fit_params)
        if validation is not None:
            held_out = validation.dataset(net)
        inspected = self._inspect(net, seen, is_trained=True)
        if self._chooses_weights():
            fitted = FittedNetwork(net, inspected, seen, None)
            options = {"indices": self._chosen_weights(fitted)}
            inspected = self._inspect(net, seen, is_trained=True, options=options)
        if self._is_frozen():  # else that was said before the training
            warn_if_double_softmax(net, inspected)
        return FittedNetwork(net, inspected, seen, held_out)

    def _new_net(self, data: TrainingData) -> Any:
        if self.estimator is None:
            return self._default_net(data)
        # a copy, so that training the original further cannot outdate the posterior
        return copied(self._net()) if self._is_frozen() else clone(self._net())

    def _train(
        self, net: Any, data: TrainingData, fit_params: dict[str, Any]
    ) -> tuple[Any, Any]:
        def check(dataset: Any, held_out: Any) -> None:
            self._check_held_out(dataset, held_out)
            self._check_targets(net, data.y)
            _match_targets(net, dataset)
            inspected = self._inspect(net, dataset, is_trained=False)
            warn_if_double_softmax(net, inspected)

        rows = data.X, data.y, data.sample_weight
        seen, held_out = train(net, *rows, check, **fit_params)
        _check_history(net)
        return seen, held_out

    def _check_targets(self, net: Any, y: np.ndarray) -> None:
        """Overridden where a criterion does not take all numbers."""

    def _check_held_out(self, dataset: Any, held_out: Any) -> None:
        """Overridden where targets are encoded: a split may bring its own."""

    def _hold_out(self, data: TrainingData) -> tuple[TrainingData, TrainingData | None]:
        """Set rows aside for the tuner, if it wants some and there are enough."""
        if not self._tunes_on_rows():
            return data, None
        parts = holdout.split_by_content(
            data.X,
            data.y,
            self.validation_fraction,
            self._seed,
            stratify=self._stratify,
        )
        if parts is None:
            return data, None
        return data.take(parts[0]), data.take(parts[1])

    def _require_no_rows(self) -> None:
        """Refuse, before training, a tuner whose rows are not there."""
        reason = "the network is frozen, so that only you know what it has seen"
        if not self._is_frozen():
            reason = f"fewer than {holdout.MIN_ROWS} distinct rows are too few to share"
        if self._tuners()[:1] == ["validation"]:
            raise ValueError(
                "'validation' needs rows that the network did not see, and there are "
                f"none: {reason}. Pass X_val and y_val to fit, or use "
                "prior_precision='marglik'."
            )

    def _chooses_weights(self) -> bool:
        """Whether the training decides which single weights are random."""
        is_subnetwork = isinstance(self.subset_of_weights, str) and (
            self.subset_of_weights == "subnetwork"
        )
        return is_subnetwork and "indices" not in (self.subset_params or {})

    def _chosen_weights(self, fitted: FittedNetwork) -> Tensor:
        """Places of the weights that the criterion prefers."""
        options = self.subset_params or {}
        forward = fitted.forward()
        with forward.frozen():
            layout = select(forward, first_rows(fitted.net, fitted.train), "all", {})
            question = Question(
                forward,
                layout,
                fitted.inspected.likelihood,
                lambda: self._batches(fitted, fitted.train),
                self._seed,
            )
            by = options.get("by", CRITERION)
            return choose(question, by, fitted.inspected.layout.n_parameters)

    def _inspect(
        self,
        net: Any,
        dataset: Any,
        *,
        is_trained: bool,
        options: dict[str, Any] | None = None,
    ) -> Inspected:
        """Read the net's conventions and refuse what does not fit."""
        inspected = inspect(
            net,
            first_rows(net, dataset),
            self.subset_of_weights,
            self._likelihoods,
            self._n_outputs(),
            is_trained=is_trained,
            options=options or self.subset_params,
            likelihood=self.likelihood,
            adapted=self._adapted,
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

    def _adapted(self, likelihood: Likelihood) -> Likelihood:
        """Overridden where settings say more of a likelihood than the criterion."""
        return likelihood

    def _check_head_rows(
        self, inspected: Inspected, n_rows: int, device: torch.device
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


def _match_targets(net: Any, dataset: Any) -> None:
    """Give real-valued targets the number of axes that the module's outputs have.

    A criterion would broadcast (n,) against (n, 1) to (n, n), or refuse.
    """
    y = getattr(dataset, "y", None)
    if not isinstance(y, np.ndarray) or y.dtype.kind != "f":
        return
    with view(net).frozen():
        n_axes = raw_outputs(net, first_rows(net, dataset)).ndim
    if n_axes == 1 and y.ndim == 2 and y.shape[1] == 1:
        dataset.y = y.ravel()
    elif n_axes == 2 and y.ndim == 1:
        dataset.y = y.reshape(-1, 1)


def _check_history(net: Any) -> None:
    """Report training that went wrong as such, not as what it leads to."""
    losses = [row["train_loss"] for row in net.history if "train_loss" in row]
    if not losses:
        return
    if not np.isfinite(losses[-1]):
        raise ValueError(
            f"The training of the network has diverged: its loss is {losses[-1]} "
            "after the last epoch. Lower the learning rate or scale the inputs."
        )
    if losses[-1] > 10 * abs(losses[0]) + 1:
        warnings.warn(
            f"The training of the network seems to have diverged: its loss rose from "
            f"{losses[0]:.3g} to {losses[-1]:.3g}. Lower the learning rate or scale "
            "the inputs.",
            UserWarning,
            stacklevel=2,
        )

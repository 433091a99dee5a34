"""Members that `BaseLaplace` and `BaseSampling` share without another base class.

Both classes assign these functions as methods.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numpy.typing import ArrayLike
from sklearn.base import is_classifier
from sklearn.utils._param_validation import validate_parameter_constraints
from sklearn.utils.metaestimators import available_if

from sklaplace.core import progress
from sklaplace.core.budget import moved_entries
from sklaplace.core.serialise import from_portable, pickled, to_portable, worker_state
from sklaplace.core.trees import Inputs
from sklaplace.estimators.options.given_net import check_net, inner_net
from sklaplace.estimators.options.laplace import check_likelihood, sibling
from sklaplace.estimators.training.samples import (
    EncodedData,
    InputForm,
    Samples,
    encode_samples,
)
from sklaplace.networks.trained import device_of

# fitted attributes with tensors
_WITH_TENSORS = "posterior_", "network_spec_", "_novelty"
# attributes that functions of outputs do not need
_SENT_APART = "estimator", "estimator_", "prior", "memory", "posterior_", "_novelty"
# parameters of predictions, which can change after fit
_PREDICTING = "pred_type", "n_samples", "batch_size", "n_jobs", "residual"


# ----------------------------------------------------------------------------- fit
@contextmanager
def reported(self: Any) -> Iterator[None]:
    """Report progress and a summary; restore all attributes if anything raises."""
    before = dict(vars(self))
    with progress.reporting(type(self).__name__, self.verbose):
        try:
            yield
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise
        if self.verbose:
            progress.line(self._summary())


def check_parameters(self: Any) -> None:
    """Raise an error for invalid parameters."""
    self._validate_params()
    example, keeps_weights = self._targets_kind.example_net, self._keeps_weights
    check_net(self.estimator, example, keeps_weights=keeps_weights)
    other = sibling(type(self).__name__, is_classifier(self))
    check_likelihood(self.likelihood, is_classifier(self), other)


def check_settings(self: Any) -> None:
    """Raise an error for invalid parameters of predictions."""
    values = {name: getattr(self, name) for name in _PREDICTING if hasattr(self, name)}
    validate_parameter_constraints(
        self._parameter_constraints, values, type(self).__name__
    )


# ------------------------------------------------------------------------- samples
def encode(self: Any, samples: Samples) -> EncodedData:
    """Return encoded samples, and set the encoding of later samples."""
    self._input_type = InputForm.of(inner_net(self.estimator))
    owner, infer = type(self).__name__, self._infer_targets
    return encode_samples(samples, owner, self._check_samples, infer)


def check_samples(
    self: Any, X: Inputs, y: ArrayLike, *, reset: bool
) -> tuple[Any, Any]:
    """Return validated inputs and targets, with inputs cast."""
    options = {"reset": reset, "allow_nd": is_classifier(self)}
    X, y = self._input_type.check_samples(self, X, y, **options)
    if reset:
        self._input_type = self._input_type.seen(X)
    return X, y


# --------------------------------------------------------------------- persistence
def reduce_ex(self: Any, protocol: object) -> Any:
    """Pickle the estimator with tensors on the CPU; skorch pickles the networks."""
    state = worker_state(vars(self), _SENT_APART)
    return pickled(self, moved_entries(state, _WITH_TENSORS, "cpu"))


def getstate(self: Any) -> dict[str, Any]:
    """Return the state without tensors for skops, see `to_portable`."""
    return to_portable(vars(self))


def setstate(self: Any, state: dict[str, Any]) -> None:
    """Restore the state, with tensors on the network's device."""
    vars(self).update(from_portable(state))
    if "estimator_" in vars(self):
        device = device_of(self.estimator_)
        vars(self).update(moved_entries(vars(self), _WITH_TENSORS, device))


# ------------------------------------------------------------------------- display
@available_if(lambda self: hasattr(self, "estimator_"))  # type: ignore[untyped-decorator]
def visual_block(self: Any) -> Any:
    """Return the block of a fitted estimator in a notebook, with its summary.

    Unfitted estimators use scikit-learn's default block.
    """
    from sklearn.utils._repr_html.estimator import _VisualBlock

    try:
        caption = self._summary()
    except ValueError:  # an invalid parameter, set after fit, raises later
        caption = None
    name = type(self).__name__
    return _VisualBlock(
        "single", self, names=name, name_details=str(self), name_caption=caption
    )

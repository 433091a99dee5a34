"""What scikit-learn's diagram of an estimator shows in a notebook."""

from importlib.metadata import PackageNotFoundError, metadata
from typing import Any, TypeVar

from sklearn.base import BaseEstimator
from sklearn.utils.metaestimators import available_if

from sklaplace.estimators.fitting.summary import maximises_evidence

T = TypeVar("T", bound=type)

PACKAGE = "sklaplace"
# of the fitted attributes: what the network was found to be, for the package's own use
INTERNAL = {"network_spec_"}


def page_template(_model: Any) -> str:
    """Return the address of the page of an estimator, with its name to be filled in.

    It is empty, so that there is no link, where the metadata of the installed package
    name no address of the documentation.
    """
    try:
        entries = metadata(PACKAGE).get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    home = dict(entry.split(", ", 1) for entry in entries).get("Documentation")
    if home is None:
        return ""
    return f"{home.rstrip('/')}/generated/{PACKAGE}.{{estimator_name}}.html"


def _is_fitted(model: Any) -> bool:
    return hasattr(model, "estimator_")


@available_if(_is_fitted)
def fitted_block(model: Any) -> Any:
    """Return the block of a fitted estimator, whose caption says what was fitted.

    Others have scikit-learn's own.
    """
    from sklearn.utils._repr_html.estimator import _VisualBlock

    try:
        caption = model._summary()
    except ValueError:  # of a parameter that was set after fit, and is refused later
        caption = None
    name = type(model).__name__
    return _VisualBlock(
        "single", model, names=name, name_details=str(model), name_caption=caption
    )


def shown_attributes(model: Any, doc_link: str = "") -> Any:
    """Return the table of fitted attributes, without those that would mislead."""
    table = BaseEstimator._get_fitted_attr_html(model, doc_link)
    hidden = set(INTERNAL)
    if hasattr(model, "_options") and not maximises_evidence(model):
        hidden.add("log_marginal_likelihood_value_")
    for name in hidden & table.keys():
        del table[name]
    return table


def displayed(kind: T) -> T:
    """Give a class of estimators what scikit-learn's diagram asks them for."""
    kind._doc_link_module = PACKAGE
    kind._doc_link_template = property(page_template)
    kind._sk_visual_block_ = fitted_block
    kind._get_fitted_attr_html = shown_attributes
    return kind

"""Diagram: scikit-learn's display of an estimator in a notebook."""

from importlib.metadata import PackageNotFoundError, metadata
from typing import Any, TypeVar

from sklearn.base import BaseEstimator
from sklearn.utils.metaestimators import available_if

T = TypeVar("T", bound=type)

PACKAGE = "sklaplace"
# Fitted attributes for internal use.
INTERNAL = {"network_spec_"}


def page_template() -> str:
    """Return the URL template of an estimator's documentation page.

    The template is empty, which gives no link, if the metadata of the installed package
    has no documentation URL.
    """
    try:
        entries = metadata(PACKAGE).get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    home = dict(entry.split(", ", 1) for entry in entries).get("Documentation")
    if home is None:
        return ""
    return f"{home.rstrip('/')}/generated/{PACKAGE}.{{estimator_name}}.html"


class Diagram:
    """Members of an estimator that scikit-learn's diagram uses."""

    _doc_link_module = PACKAGE
    _doc_link_template = property(lambda self: page_template())

    @available_if(lambda self: hasattr(self, "estimator_"))  # type: ignore[untyped-decorator]
    def _sk_visual_block_(self: Any) -> Any:
        """Return the block of a fitted estimator, with its summary as the caption.

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

    def _get_fitted_attr_html(self: object, doc_link: str = "") -> Any:
        """Return the table of fitted attributes, without misleading ones.

        If the prior was not chosen by the evidence, the evidence at weights that were
        not refitted says little about the model.
        """
        table = _PLAIN_TABLE(self, doc_link)
        hidden = set(INTERNAL)
        if hasattr(self, "_options") and self._options.tuner != "marglik":
            hidden.add("log_marginal_likelihood_value_")
        for name in hidden & table.keys():
            del table[name]
        return table


_PLAIN_TABLE: Any = getattr(BaseEstimator, "_get_fitted_attr_html", None)


def displayed(kind: T) -> T:
    """Add the members of `Diagram` to an estimator class without a new base class."""
    for name, member in vars(Diagram).items():
        if not name.startswith("__"):
            setattr(kind, name, member)
    return kind

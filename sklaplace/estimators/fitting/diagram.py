"""Diagram: what scikit-learn shows of an estimator in a notebook."""

from importlib.metadata import PackageNotFoundError, metadata
from typing import Any, TypeVar

from sklearn.base import BaseEstimator
from sklearn.utils.metaestimators import available_if

T = TypeVar("T", bound=type)

PACKAGE = "sklaplace"
# Fitted attributes for the package's own use.
INTERNAL = {"network_spec_"}


def page_template() -> str:
    """Return the address of an estimator's page, with its name to be filled in.

    It is empty, so that there is no link, where the metadata of the installed package
    have no address of the documentation.
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
    """The members that scikit-learn's diagram asks an estimator for."""

    _doc_link_module = PACKAGE
    _doc_link_template = property(lambda self: page_template())

    @available_if(lambda self: hasattr(self, "estimator_"))  # type: ignore[untyped-decorator]
    def _sk_visual_block_(self: Any) -> Any:
        """Return the block of a fitted estimator, whose caption is its summary.

        Unfitted estimators have scikit-learn's own.
        """
        from sklearn.utils._repr_html.estimator import _VisualBlock

        try:
            caption = self._summary()
        except ValueError:  # a parameter that was set after fit, and is refused later
            caption = None
        name = type(self).__name__
        return _VisualBlock(
            "single", self, names=name, name_details=str(self), name_caption=caption
        )

    def _get_fitted_attr_html(self: Any, doc_link: str = "") -> Any:
        """Return the table of fitted attributes, without those that would mislead.

        Under a prior that was not chosen by the evidence, the evidence at weights that
        were not refitted says little about the model.
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
    """Give a class of estimators the members of `Diagram`, without a further base."""
    for name, member in vars(Diagram).items():
        if not name.startswith("__"):
            setattr(kind, name, member)
    return kind

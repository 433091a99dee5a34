"""Warnings at the user's line: one for a search, however many fits it makes."""

import sys
import warnings

# code between a user's line and a fit
PACKAGES = {"sklaplace", "sklearn", "skorch", "joblib", "contextlib", "threading"}
PACKAGES |= {"concurrent"}

_SHOWN: set[tuple[str | int, ...]] = set()


def warn_user(
    message: str, category: type[Warning] = UserWarning, *, once: bool = False
) -> None:
    """Warn at the line that called this package, maybe through scikit-learn.

    Under Python's default filters once for each such line. Python itself forgets what
    it has shown as soon as any code changes the filters, which scikit-learn does for
    every fit of a search. With ``once`` a message is never repeated, whatever the
    filters.
    """
    frame = sys._getframe(1)
    while (
        frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in PACKAGES
    ):
        frame = frame.f_back
    line = frame.f_code.co_filename, frame.f_lineno
    key = (message,) if once else (message, *line)
    action = _action(message, category)
    repeats = action == "error" or (action == "always" and not once)
    if repeats or key not in _SHOWN:
        warnings.warn_explicit(message, category, *line)
        if action != "ignore":
            _SHOWN.add(key)


def _action(message: str, category: type[Warning]) -> str:
    """What the filters in force do with a warning."""
    for action, pattern, kind, module, line in warnings.filters:
        is_meant = issubclass(category, kind) and module is None and not line
        if is_meant and (pattern is None or pattern.match(message)):
            return action
    return "default"

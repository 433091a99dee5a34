"""show_versions: the releases in use, for bug reports."""

from importlib import import_module

import sklearn
import torch


def show_versions() -> None:
    """Print the releases of this package and its dependencies, and the machine.

    Paste the output into bug reports. The output begins with the output of
    :func:`sklearn.show_versions`, which names Python, the system and the thread pools.

    Read more in the :doc:`User Guide </user_guide/faq>`.

    See Also
    --------
    sklearn.show_versions : The same for scikit-learn and its dependencies.

    Examples
    --------
    >>> import sklaplace
    >>> sklaplace.show_versions()  # doctest: +ELLIPSIS
    <BLANKLINE>
    System:
    ...
    Networks:
        sklaplace: ...
           skorch: ...
            torch: ...
          threads: ...
             CUDA: ...
             GPUs: ...
    """
    sklearn.show_versions()
    values = {
        name: import_module(name).__version__
        for name in ("sklaplace", "skorch", "torch")
    }
    values["threads"] = torch.get_num_threads()
    values["CUDA"] = torch.version.cuda
    values["GPUs"] = torch.cuda.device_count()
    print("\nNetworks:")  # noqa: T201
    for name, value in values.items():
        print(f"{name:>13}: {value}")  # noqa: T201

"""The version of this package, and the releases in use, for bug reports."""

import sklearn
import skorch
import torch

__version__ = "0.1.0"


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
        "sklaplace": __version__,
        "skorch": skorch.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "CUDA": torch.version.cuda,
        "GPUs": torch.cuda.device_count(),
    }
    print("\nNetworks:")  # noqa: T201
    for name, value in values.items():
        print(f"{name:>13}: {value}")  # noqa: T201

"""Checkpoint: a folder in which a computation of several steps keeps what it has found.

A file is replaced as a whole, so that whatever happens, each is that of before or that
of after. All files belong to one computation, that of a key.
"""

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sklaplace.core.folder import UnsafeFolderError, make_private, require_private_entry
from sklaplace.core.packing import DamagedError, pack, unpack

_SUFFIX = ".checkpoint"
_NEW = "new-"


@dataclass(frozen=True)
class Checkpoint:
    """Files of one computation, in a folder.

    Attributes
    ----------
    folder : Path
        Where the files are.
    key : str
        Of everything that the computation depends on, from `fingerprint`.
    named : mapping
        Large inputs of the computation, which are not stored.
    rank : int
        Number of the process, of several that have the same folder.
    """

    folder: Path
    key: str
    named: Mapping[str, Any]
    rank: int = 0

    @classmethod
    def at(
        cls, path: Any, key: str, named: Mapping[str, Any], rank: int = 0
    ) -> "Checkpoint":
        """Return a checkpoint in a folder, which is made if need be.

        Raises
        ------
        TypeError, ValueError, OSError
            If ``path`` is no path, others may write to it, it cannot be made, or it has
            files of another computation.
        """
        if not isinstance(path, (str, os.PathLike)):
            kind = type(path).__name__
            raise TypeError(
                f"checkpoint is of type {kind}. Pass the path of a folder, or None."
            )
        folder = _folder(path)
        try:
            make_private(str(folder))
            require_private_entry(folder, folder)
        except UnsafeFolderError as error:
            raise UnsafeFolderError(
                f"checkpoint={os.fspath(path)!r} is not safe: {error}. What is loaded "
                "from there can run any code. Choose a folder that you alone may write "
                "to."
            ) from error
        except OSError as error:
            advice = "Choose a folder that you can write to."
            raise _named(error, folder, advice) from error
        for left in folder.glob(_name(rank, f"{_NEW}*")):  # by one that was killed
            left.unlink(missing_ok=True)
        found = cls(folder, key, named, rank)
        found._check_owner()
        return found

    def _check_owner(self) -> None:
        """Raise for files of another computation."""
        owner = self._path("key")
        if not owner.exists():
            self._write(owner, self.key.encode())
        elif owner.read_bytes() != self.key.encode():
            raise ValueError(
                f"checkpoint={str(self.folder)!r} has the files of another fit, with "
                "other data, parameters, code or weights. Choose another folder, or "
                "delete this one."
            )

    def load(self, name: str) -> Any:
        """Return what was saved under a name, None if nothing was, or it is damaged."""
        with suppress(FileNotFoundError, DamagedError):
            return unpack(self._path(name).read_bytes(), self.key, self.named)
        return None

    def save(self, name: str, value: Any) -> None:
        """Save a value in place of an earlier one.

        Raises
        ------
        OSError
            If it cannot be written; the earlier one is still there.
        """
        self._write(self._path(name), pack(value, self.key, self.named))

    def restart(self, name: str, value: Any) -> None:
        """Save a value in place of all that there is, which was computed from another.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        for file in self.folder.glob(_name(self.rank, "*")):
            if file != self._path("key"):
                file.unlink(missing_ok=True)
        self.save(name, value)

    def _path(self, name: str) -> Path:
        return self.folder / _name(self.rank, name)

    def _write(self, path: Path, content: bytes) -> None:
        """Write a file as a whole, or leave what there was."""
        try:
            start = _name(self.rank, _NEW).removesuffix(_SUFFIX)
            handle, temporary = tempfile.mkstemp(_SUFFIX, start, self.folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            advice = (
                "What was saved before is still there: make space, and fit again, to "
                "go on from it."
            )
            raise _named(error, self.folder, advice) from error


def _name(rank: int, name: str) -> str:
    return f"rank-{rank}-{name}{_SUFFIX}"


def clear(path: Any, rank: int = 0) -> None:
    """Remove the files of a checkpoint, and the folder if it is empty then.

    None stands for no checkpoint.
    """
    if path is None:
        return
    folder = _folder(path)
    for file in folder.glob(_name(rank, "*")):
        file.unlink(missing_ok=True)
    with suppress(OSError):  # it has files of others
        folder.rmdir()


def _folder(path: Any) -> Path:
    """Return the folder of a path, in which ``~`` is the user's."""
    if not os.fspath(path):
        raise ValueError("checkpoint is empty. Pass the path of a folder, or None.")
    return Path(path).expanduser().absolute()


def _named(error: OSError, folder: Path, advice: str) -> OSError:
    """Return an error that names the parameter."""
    reason = error.strerror or error
    return OSError(error.errno, f"checkpoint={str(folder)!r}: {reason}. {advice}")

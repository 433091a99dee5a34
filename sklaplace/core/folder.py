"""Folder: one that nobody else may write to, for files that run code when loaded.

A pickle runs code when it is loaded, so that whoever may write to a cache can run code
as the user who reads it. Permissions are checked on POSIX systems alone; access control
lists are not read.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path


class UnsafeFolderError(ValueError):
    """A folder that others may write to."""


def make_private(path: str) -> None:
    """Make a folder and its parents where they are missing, for the user alone.

    Raises
    ------
    UnsafeFolderError
        If others may write to the folder, where that can be told: it belongs to
        another user (root excepted), everybody may write to it, or its group, unless
        that is the user's own; or if everybody may write to a parent that is not
        sticky, as /tmp is.
    OSError
        If it cannot be made.

    Notes
    -----
    A parent may belong to another user, and its group may write to it, as with folders
    of projects on shared machines. Whoever may write to it can replace the folder by
    one of their own, which is refused as belonging to another user.
    """
    folder = Path(os.path.realpath(path))
    require_private(folder)
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    for part in reversed(missing):
        with suppress(FileExistsError):  # another process was faster
            part.mkdir(mode=0o700)
    if missing:
        require_private(folder)


def require_private(path: str | os.PathLike[str]) -> None:
    """Raise an error if others may write to a folder; see `make_private`."""
    if os.name != "posix":
        return
    folder = Path(os.path.realpath(path))
    if folder.exists() and (fault := _fault(folder.stat())):
        raise UnsafeFolderError(
            f"{folder} {fault}; use a new, empty folder, or delete what is in it and "
            "run chmod go-w, if it is yours"
        )
    for parent in folder.parents:
        mode = parent.stat().st_mode if parent.exists() else 0
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UnsafeFolderError(
                f"everybody may replace what is in {parent}; run chmod o-w, or +t"
            )


def require_private_entry(
    entry: str | os.PathLike[str], root: str | os.PathLike[str]
) -> None:
    """Raise an error if others may write to files, or may have written them.

    Parameters
    ----------
    entry : str or os.PathLike
        Their folder, which need not exist.
    root : str or os.PathLike
        A folder above; it and those between are checked as well.

    Raises
    ------
    UnsafeFolderError
        If the root, a folder below it on the way to the entry, or a file in the entry
        is one that others may write to, as in `make_private`, or, except for the root,
        a link.

    Notes
    -----
    Permissions do not count below a folder that only its owner may enter; owners do.
    The root is no such folder: it may have been open before.
    """
    if os.name != "posix":
        return
    top, is_closed = Path(os.path.realpath(root)), False
    folder = top
    _require_own(top, top, is_closed)
    for name in Path(entry).relative_to(root).parts:
        folder /= name
        mode = _require_own(folder, top, is_closed)
        is_closed = is_closed or not mode & (stat.S_IXGRP | stat.S_IXOTH)
    for file in folder.iterdir() if folder.exists() else ():
        _require_own(file, top, is_closed)


def _require_own(path: Path, root: Path, is_closed: bool) -> int:
    """Return the mode of a file or folder, if others may not write to it."""
    try:
        found = path.lstat()
    except FileNotFoundError:  # removed by another process
        return 0o777
    is_link = stat.S_ISLNK(found.st_mode)
    if fault := "is a link" if is_link else _fault(found, is_closed):
        raise UnsafeFolderError(
            f"{path} {fault}; use a new, empty folder, or delete what is in {root}"
        )
    return found.st_mode


def _fault(found: os.stat_result, is_closed: bool = False) -> str | None:
    """Why others may write to a file or folder, if they may.

    They need write permission only where the folders above are not closed to them.
    """
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (uid {found.st_uid})"
    if is_closed:
        return None
    if found.st_mode & stat.S_IWOTH:
        return "may be written to by everybody"
    if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
        return f"may be written to by its group (gid {found.st_gid})"
    return None


def _is_own_group(gid: int) -> bool:
    """Whether a group has the user alone, as where each user has a group by default."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    is_primary = user.pw_gid == gid and user.pw_name == group.gr_name
    return is_primary and set(group.gr_mem) <= {user.pw_name}

"""Folders that others may write to are told from those of the user."""

import os
import stat
from types import SimpleNamespace

import pytest

from sklaplace.core import folder
from sklaplace.core.folder import (
    UnsafeFolderError,
    make_private,
    require_private,
    require_private_entry,
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs permissions")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    """Sets the mask of new files, and restores it."""
    before = os.umask(0)
    os.umask(before)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask", [0, 0o002, 0o022, 0o077])
def test_new_folders_are_for_the_user_alone(tmp_path, umask, mask):
    umask(mask)
    make_private(os.fspath(tmp_path / "a" / "b"))
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700
    make_private(os.fspath(tmp_path / "a" / "b"))


@pytest.mark.parametrize("bits", [0o700, 0o755, 0o750, 0o500, 0o1700])
def test_existing_folders_of_the_user_are_kept(tmp_path, bits):
    tmp_path.chmod(bits)
    make_private(os.fspath(tmp_path))
    assert mode(tmp_path) == bits
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("bits", [0o777, 0o702, 0o722, 0o1777])
def test_folders_that_everybody_may_write_to(tmp_path, bits):
    tmp_path.chmod(bits)
    with pytest.raises(UnsafeFolderError, match="written to by everybody; use a new"):
        make_private(os.fspath(tmp_path))
    assert mode(tmp_path) == bits
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["child", "a/b/c"])
def test_parents_that_everybody_may_write_to(tmp_path, name):
    tmp_path.chmod(0o777)
    with pytest.raises(UnsafeFolderError, match="everybody may replace what is in"):
        make_private(os.fspath(tmp_path / name))
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o1777)  # as /tmp
    make_private(os.fspath(tmp_path / name))


@pytest.mark.parametrize("bits", [0o770, 0o2770])
def test_parents_that_a_group_may_write_to_are_accepted(tmp_path, bits):
    tmp_path.chmod(bits)  # as folders of a project are
    make_private(os.fspath(tmp_path / "child"))


def test_advice_does_not_keep_what_others_may_have_written(tmp_path):
    tmp_path.chmod(0o777)
    message = "use a new, empty folder, or delete what is in it and run chmod go-w, if"
    with pytest.raises(UnsafeFolderError, match=message):
        require_private(tmp_path)


def test_links_count_by_what_they_lead_to(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(UnsafeFolderError, match="/open may be written to"):
        require_private(tmp_path / "link")


@pytest.mark.parametrize(
    ("owner", "bits", "gid", "members", "fault"),
    [
        (7, 0o755, 7, [], None),
        (0, 0o755, 0, [], None),
        (8, 0o700, 7, [], "belongs to another user (uid 8)"),
        (7, 0o775, 7, [], None),  # a group for each user, and umask 002
        (7, 0o775, 7, ["me"], None),
        (7, 0o775, 7, ["other"], "may be written to by its group (gid 7)"),
        (7, 0o775, 100, [], "may be written to by its group (gid 100)"),
        (7, 0o775, 404, [], "may be written to by its group (gid 404)"),
        (7, 0o2755, 100, [], None),
    ],
)
def test_owners_and_groups(monkeypatch, owner, bits, gid, members, fault):
    grp, pwd = pytest.importorskip("grp"), pytest.importorskip("pwd")

    def group(number):
        names = {7: "me", 100: "users"}
        return SimpleNamespace(gr_name=names[number], gr_mem=members)

    user = SimpleNamespace(pw_name="me", pw_gid=7)
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(grp, "getgrgid", group)
    found = SimpleNamespace(st_uid=owner, st_mode=bits, st_gid=gid)
    assert folder._fault(found) == fault


@pytest.fixture
def entry(tmp_path):
    """A file in a folder of a folder, as a cache has them."""
    folder = tmp_path / "root" / "function" / "entry"
    make_private(os.fspath(folder))
    (folder / "output.pkl").touch(0o600)
    return folder


LEVELS = ["..", "../..", ".", "output.pkl"]


def test_entries_of_the_user(entry):
    require_private_entry(entry, entry.parents[1])
    require_private_entry(os.fspath(entry), os.fspath(entry.parents[1]))


@pytest.mark.parametrize("level", LEVELS)
def test_entries_that_everybody_may_write_to(entry, level):
    """In folders that others may enter."""
    for path in (entry.parents[1], entry.parent, entry):
        path.chmod(0o755)
    (entry / level).resolve().chmod(0o777)
    with pytest.raises(UnsafeFolderError, match="everybody; use a new, empty folder"):
        require_private_entry(entry, entry.parents[1])


@pytest.mark.parametrize("level", LEVELS)
def test_entries_of_others(entry, level, monkeypatch):
    """Also in a folder that is closed now."""
    other, lstat = (entry / level).resolve(), type(entry).lstat

    def changed(path):
        found = lstat(path)
        owner = found.st_uid + 12345 * (path == other)
        return SimpleNamespace(st_uid=owner, st_mode=found.st_mode, st_gid=found.st_gid)

    monkeypatch.setattr(type(entry), "lstat", changed)
    message = f"{other} belongs to another user .* delete what is in "
    with pytest.raises(UnsafeFolderError, match=message):
        require_private_entry(entry, entry.parents[1])


def test_permissions_below_a_closed_folder_do_not_count(entry):
    entry.chmod(0o777)
    (entry / "output.pkl").chmod(0o666)
    require_private_entry(entry, entry.parents[1])
    # the root may have been open when the file was written
    entry.parent.chmod(0o755)
    with pytest.raises(UnsafeFolderError, match="/entry may be written to by everyb"):
        require_private_entry(entry, entry.parents[1])


def test_entries_that_are_links(entry, tmp_path):
    (tmp_path / "file").touch(0o600)
    (entry / "output.pkl").unlink()
    (entry / "output.pkl").symlink_to(tmp_path / "file")
    with pytest.raises(UnsafeFolderError, match=r"output.pkl is a link"):
        require_private_entry(entry, entry.parents[1])
    (tmp_path / "link").symlink_to(entry.parents[1])  # chosen by the user
    (entry / "output.pkl").unlink()
    require_private_entry(tmp_path / "link" / "function" / "entry", tmp_path / "link")


def test_entries_that_are_not_there(entry):
    require_private_entry(entry.parent / "missing", entry.parents[1])

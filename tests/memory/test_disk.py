"""What a killed process, a full disk or a second writer leaves."""

import concurrent.futures
import errno
import fcntl
import os
import shutil

import pytest

from memory import files, reading
from memory.store import Store
from specpilot_jax.errors import SpecPilotError
from tests.memory import kit


class _Killed(BaseException):
  pass


class _Calls:
  """Lets so many calls happen."""

  def __init__(self, fatal: int):
    self.made, self._fatal = 0, fatal

  def counted(self, real):
    def call(*args, **kwargs):
      self.made += 1
      if self.made > self._fatal:
        raise _Killed
      return real(*args, **kwargs)

    return call


def test_an_addition_that_dies_anywhere_leaves_a_sound_memory(
  made, tmp_path, monkeypatch
):
  """Every call that reaches the disk is the last one, in turn."""
  source, ids = made
  deaths = 0
  for fatal in range(60):
    root = tmp_path / f"{fatal}"
    shutil.copytree(source, root)
    store, calls = Store(root), _Calls(fatal)
    with monkeypatch.context() as m:
      for name in ("fsync", "replace", "rename"):
        m.setattr(os, name, calls.counted(getattr(os, name)))
      try:
        kit.add(store, "late", lambda t: kit.edited(t, kit.A, 12, "late"))
      except _Killed:
        deaths += 1
    survived = Store(root)
    assert set(ids.values()) <= set(survived.entries)
    assert all("addition did not end" in p for p in reading.problems(root))
    late = kit.add(survived, "late", lambda t: kit.edited(t, kit.A, 12, "late"))
    assert reading.problems(root) == [] and late in Store(root).entries
    if calls.made <= fatal:
      break
  assert deaths == fatal > 8


@pytest.mark.parametrize("at", (1, 3, 5, 7))
def test_a_full_disk_is_named_and_nothing_is_left(place, monkeypatch, at):
  root, _ = place
  store, calls, fsync = Store(root), 0, os.fsync

  def full(descriptor):
    nonlocal calls
    calls += 1
    if calls == at:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fsync(descriptor)

  def add(store):
    return kit.add(store, "late", lambda t: kit.edited(t, kit.A, 12, "late"))

  with monkeypatch.context() as m:
    m.setattr(os, "fsync", full)
    with pytest.raises((SpecPilotError, OSError), match="No space left") as e:
      add(store)
  if isinstance(e.value, SpecPilotError):  # Of a file, not of a folder.
    assert str(e.value).startswith(str(root))
    assert not list(root.rglob(f"{files.PARTIAL}*"))
  assert all("addition did not end" in p for p in reading.problems(root))
  assert add(Store(root)) in Store(root).entries
  assert reading.problems(root) == []


def test_several_writers_wait_for_each_other(place):
  root, ids = place
  fields = {"kind": "negative", "factor": "tau", "reason": "small"}
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    stores = [Store(root) for _ in range(4)]
    made = pool.map(
      lambda i: stores[i].add(fields | {"title": f"idea {i}"}), range(4)
    )
    names = set(made)
  assert len(names) == 4 and names <= set(Store(root).entries)
  assert reading.problems(root) == []
  assert len(Store(root).log) == 1 + len(ids) + 4


def test_a_memory_is_read_without_a_lock_where_there_is_none(
  place, monkeypatch
):
  root, ids = place

  def no_lock(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

  monkeypatch.setattr(fcntl, "flock", no_lock)
  assert reading.verify(root) == len(ids)


def test_a_second_writer_is_refused_after_a_while(place, monkeypatch):
  root, _ = place
  monkeypatch.setattr(files, "WAIT_S", 0.0)
  store = Store(root)
  with (
    files.locked(root),
    pytest.raises(SpecPilotError, match="another process"),
  ):
    store.note_conflict([], "x")

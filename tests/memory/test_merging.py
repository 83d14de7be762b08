"""Three-way merges: against git's where both merge, and by their rules."""

import doctest
import subprocess

import numpy as np
import pytest

import memory
from memory import (
  commands,
  manifest,
  merging,
  rounds,
  schema,
  sources,
  store,
  transfer,
)
from memory.merging import MergeError, merge_text, merge_trees

MODULES = (
  memory, commands, manifest, merging, rounds, schema, sources, store, transfer,
)  # fmt: skip
LINES = [f"line {i}\n" for i in range(12)]
TEXT = "".join(LINES)


def _random_edit(rng) -> str:
  """The text with one line replaced, removed, or another one put in."""
  lines, at = list(LINES), int(rng.integers(len(LINES)))
  kind = rng.integers(3)
  new = f"new {rng.integers(4)}\n"
  lines[at : at + int(kind != 0)] = [] if kind == 1 else [new]
  return "".join(lines)


def _git(tmp_path, base: str, ours: str, theirs: str) -> str | None:
  for name, text in (("base", base), ("ours", ours), ("theirs", theirs)):
    (tmp_path / name).write_text(text)
  done = subprocess.run(
    ["git", "merge-file", "-p", "ours", "base", "theirs"],
    cwd=tmp_path,
    capture_output=True,
    text=True,
  )
  return done.stdout if done.returncode == 0 else None


def test_merges_are_those_of_git(tmp_path):
  rng = np.random.default_rng(0)
  clean = 0
  for _ in range(60):
    ours, theirs = _random_edit(rng), _random_edit(rng)
    text, clashes = merge_text(TEXT, ours, theirs)
    expected = _git(tmp_path, TEXT, ours, theirs)
    assert (not clashes) == (expected is not None), (ours, theirs)
    if not clashes:
      assert text == expected
      clean += 1
  assert 30 < clean < 60


def test_clashes_name_file_and_place():
  ours = TEXT.replace("line 4\nline 5\n", "ours\n")
  theirs = TEXT.replace("line 5\n", "theirs\n").replace("line 9\n", "")
  with pytest.raises(MergeError) as e:
    merge_trees(
      {"a.py": TEXT.encode(), "b.py": b"1"},
      {"a.py": ours.encode()},
      {"a.py": theirs.encode(), "b.py": b"2"},
    )
  first, second = e.value.clashes
  assert (first.path, first.line, first.ours) == ("a.py", 5, "ours\n")
  assert first.theirs == "line 4\ntheirs\n"
  assert str(first) == "a.py: both change lines 5-6 of their ancestor"
  assert (second.path, second.line) == ("b.py", 0)
  assert "one removes what the other changes" in str(second)
  assert str(e.value).endswith("(and 1 more)")


def test_insertions_at_one_place_stand_one_behind_the_other():
  ours = TEXT.replace("line 5\n", "line 5\nours\n")
  theirs = TEXT.replace("line 5\n", "line 5\ntheirs\n")
  assert len(merge_text(TEXT, ours, theirs)[1]) == 1
  text, clashes = merge_text(TEXT, ours, theirs, both=True)
  assert clashes == []
  assert text == TEXT.replace("line 5\n", "line 5\nours\ntheirs\n")
  assert merge_text(TEXT, ours, ours, both=True) == (ours, [])
  # What stands behind something that the other side removed.
  shorter = TEXT.replace("line 4\nline 5\n", "")
  for pair in ((shorter, theirs), (theirs, shorter)):
    text, clashes = merge_text(TEXT, *pair, both=True)
    assert (text, clashes) == (
      TEXT.replace("line 4\nline 5\n", "theirs\n"), [],
    )  # fmt: skip
  # What both replace is no insertion.
  one, other = (TEXT.replace("line 5\n", x) for x in ("one\n", "other\n"))
  assert len(merge_text(TEXT, one, other, both=True)[1]) == 1


@pytest.mark.parametrize("end", ("", "\n"))
def test_files_without_a_last_newline(end):
  base = f"a\nb\nc{end}"
  assert (
    merge_text(base, f"A\nb\nc{end}", f"a\nb\nC{end}")[0] == f"A\nb\nC{end}"
  )
  text, clashes = merge_text("a\nx\nb", "a\nx\nb\n", "A\nx\nb")
  assert (text, clashes) == ("A\nx\nb\n", [])


def test_sources_are_packed_and_checked(tmp_path):
  tree = {
    "specpilot_jax/a.py": "x = 'ä'\n".encode(),
    "pallas_kernels/b.py": b"",
  }
  data = sources.pack(tree)
  assert sources.unpack(data) == tree and data == sources.pack(tree)
  for damaged in (b"", data[:-9], data[:40] + b"\0" + data[41:], b"x" * 99):
    with pytest.raises(sources.SpecPilotError, match="damaged"):
      sources.unpack(damaged)
  with pytest.raises(sources.SpecPilotError, match="no source"):
    sources.unpack(sources.pack({"specpilot_jax/../a.py": b""}))
  sources.write(tree, tmp_path)
  assert sources.read(tmp_path) == dict(sorted(tree.items()))
  (tmp_path / "specpilot_jax" / "link.py").symlink_to("a.py")
  with pytest.raises(sources.SpecPilotError, match="symbolic link"):
    sources.read(tmp_path)


@pytest.mark.parametrize(
  "module",
  MODULES,
  ids=lambda m: m.__name__,
)
def test_examples(module):
  done = doctest.testmod(module)
  assert done.attempted and not done.failed

"""Three-way merges of text: one change, onto a file that has changed too.

The method is diff3's (Khanna, Kunal and Pierce, "A formal investigation of
diff3", 2007): both versions are compared with their common ancestor; what only
one of them changed is taken from it, and places that both changed, or that
touch, are conflicts unless both say the same there. It is done here rather
than by a program, so that a tree that is merged from recorded patches has the
same bytes on every machine.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence

from specpilot_jax.errors import SpecPilotError


@dataclasses.dataclass(frozen=True)
class Clash:
  """A place that both sides changed.

  Attributes:
    path: of the file; empty where one text was merged.
    line: first line of the ancestor that is concerned, from 1; 0 where the
      whole file is, since one side removed it or both added it.
    base: its lines in the ancestor.
    ours, theirs: what the sides have there.
  """

  path: str
  line: int
  base: str
  ours: str
  theirs: str

  def __str__(self) -> str:
    if not self.line:
      return f"{self.path}: both add it, or one removes what the other changes"
    count = len(lines_of(self.base))
    last = self.line + max(count, 1) - 1
    lines = f"line {self.line}" if count < 2 else f"lines {self.line}-{last}"
    return f"{self.path}: both change {lines} of their ancestor"


class MergeError(SpecPilotError):
  """Changes that do not go together; `clashes` has all places."""

  def __init__(self, clashes: Sequence[Clash]):
    more = len(clashes) - 1
    super().__init__(f"{clashes[0]}{f' (and {more} more)' if more else ''}")
    self.clashes = tuple(clashes)


@dataclasses.dataclass(frozen=True)
class _Change:
  """Lines [start, end) of the ancestor are `new` on one side."""

  start: int
  end: int
  new: tuple[str, ...]


def lines_of(text: str) -> list[str]:
  """Lines with their ends; only a newline ends one."""
  parts = text.split("\n")
  lines = [part + "\n" for part in parts[:-1]]
  return lines + ([parts[-1]] if parts[-1] else [])


def _changes(base: Sequence[str], new: Sequence[str]) -> list[_Change]:
  matcher = difflib.SequenceMatcher(None, base, new, autojunk=False)
  return [
    _Change(i1, i2, tuple(new[j1:j2]))
    for tag, i1, i2, j1, j2 in matcher.get_opcodes()
    if tag != "equal"
  ]


def merge_text(
  base: str, ours: str, theirs: str, *, both: bool = False
) -> tuple[str, list[Clash]]:
  """Both changes of a text.

  >>> merge_text("a\\nb\\nc\\n", "A\\nb\\nc\\n", "a\\nb\\nC\\n")
  ('A\\nb\\nC\\n', [])
  >>> text, clashes = merge_text("a\\n", "b\\n", "c\\n")
  >>> text, clashes[0].line, clashes[0].ours, clashes[0].theirs
  ('b\\n', 1, 'b\\n', 'c\\n')

  Args:
    base: the ancestor.
    ours, theirs: the versions.
    both: takes changes that touch and do not overlap, one behind the other
      (ours first where both insert at one place), as lists that grow at their
      end need it. Otherwise those are clashes, as they are to git.

  Returns:
    The merged text, which has ours where the sides clash, and the clashes.
  """
  if ours in (base, theirs):
    return theirs, []
  if theirs == base:
    return ours, []
  lines = lines_of(base)
  sides = [_changes(lines, lines_of(text)) for text in (ours, theirs)]
  out: list[str] = []
  clashes, at = [], 0
  while sides[0] or sides[1]:
    region = _region(sides, both)
    start = min(c.start for side in region for c in side)
    end = max(c.end for side in region for c in side)
    out += lines[at:start]
    at = end
    mine, its = (_apply(lines, start, end, side) for side in region)
    out += mine if region[0] else its
    if region[0] and region[1] and mine != its:
      texts = ("".join(x) for x in (lines[start:end], mine, its))
      clashes.append(Clash("", start + 1, *texts))
  return "".join([*out, *lines[at:]]), clashes


def _region(sides: list[list[_Change]], both: bool) -> list[list[_Change]]:
  """Takes the next changes of either side that stand in each other's way."""
  region: list[list[_Change]] = [[], []]
  side = min(
    (i for i in (0, 1) if sides[i]),
    key=lambda i: (sides[i][0].start, sides[i][0].end, i),
  )
  first = sides[side].pop(0)
  region[side].append(first)
  other = sides[1 - side]
  if other and other[0] == first:
    region[1 - side].append(other.pop(0))
  start, end = first.start, first.end
  while True:
    near = [
      i
      for i in (0, 1)
      if sides[i]
      and (
        max(start, sides[i][0].start) < min(end, sides[i][0].end)
        or start < sides[i][0].start < end
        or (not both and sides[i][0].start <= end)
      )
    ]
    if not near:
      return region
    change = sides[near[0]].pop(0)
    region[near[0]].append(change)
    end = max(end, change.end)


def _apply(
  lines: Sequence[str], start: int, end: int, changes: Sequence[_Change]
) -> list[str]:
  out, at = [], start
  for change in changes:
    out += [*lines[at : change.start], *change.new]
    at = change.end
  return [*out, *lines[at:end]]


def merge_trees(
  base: Mapping[str, bytes],
  ours: Mapping[str, bytes],
  theirs: Mapping[str, bytes],
  *,
  both: bool = False,
) -> dict[str, bytes]:
  """Both changes of a tree of text files.

  >>> base = {"a.py": b"x = 1\\n", "b.py": b"y = 1\\n"}
  >>> merge_trees(base, base | {"a.py": b"x = 2\\n"}, base | {"c.py": b""})
  {'a.py': b'x = 2\\n', 'b.py': b'y = 1\\n', 'c.py': b''}

  Args:
    base: the ancestor, content by path.
    ours, theirs: the versions.
    both: see `merge_text`.

  Returns:
    The merged tree, paths in order.

  Raises:
    MergeError: names every place where the versions clash.
  """
  merged: dict[str, bytes] = {}
  clashes: list[Clash] = []
  for path in sorted(base.keys() | ours.keys() | theirs.keys()):
    before, mine, its = base.get(path), ours.get(path), theirs.get(path)
    chosen = its if mine == before else mine
    if before not in (mine, its) and mine != its:
      if before is None or mine is None or its is None:
        shown = [(x or b"").decode() for x in (before, mine, its)]
        clashes.append(Clash(path, 0, *shown))
      else:
        texts = before.decode(), mine.decode(), its.decode()
        text, found = merge_text(*texts, both=both)
        clashes += [dataclasses.replace(c, path=path) for c in found]
        chosen = text.encode()
    if chosen is not None:
      merged[path] = chosen
  if clashes:
    raise MergeError(clashes)
  return merged

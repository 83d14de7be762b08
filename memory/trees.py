"""Trees that entries make: base + dependencies + patch, and their hashes.

Each entry's patch applies, line for line, to the tree of its own dependencies.
Where several dependencies make up a tree, their changes are merged in the order
in which the entries were recorded, which is a topological one.
"""

from collections.abc import Mapping, Sequence

from memory import merging, patches, sources
from memory.manifest import manifest_of
from memory.schema import MECHANISM, Record
from specpilot_jax.errors import SpecPilotError

Tree = Mapping[str, bytes]


def check_of(record: Record):
  """What refuses paths of an entry's patch: those of a mechanism are what a
  candidate may touch, a system may change any source."""
  if record.kind == MECHANISM:
    return patches.check_path
  return sources.check_source


def closure(records: Mapping[str, Record], ids: Sequence[str]) -> list[str]:
  """Some entries and all that they stand on, in the order of `records`.

  Raises:
    SpecPilotError: one that is not there, or a cycle; named.
  """
  found: set[str] = set()

  def visit(at: str, way: tuple[str, ...]) -> None:
    if at in way:
      cycle = (*way[way.index(at) :], at)
      raise SpecPilotError(f"dependencies go in a circle: {' -> '.join(cycle)}")
    if at in found:
      return
    if at not in records:
      of = f"{way[-1]} depends on " if way else ""
      raise SpecPilotError(f"{of}{at}, which is not in the memory")
    for dependency in records[at].depends_on:
      visit(dependency, (*way, at))
    found.add(at)

  for name in ids:
    visit(name, ())
  return [name for name in records if name in found]


class Trees:
  """Makes trees of entries, each once.

  Args:
    bases: packed base trees by root hash.
    records: entries by id, in the order in which they were recorded.
    patch_of: the bytes of an entry's patch; empty where it has none.
  """

  def __init__(
    self,
    bases: Mapping[str, bytes],
    records: Mapping[str, Record],
    patch_of,
  ):
    self._bases, self._records, self._patch_of = bases, records, patch_of
    self._unpacked: dict[str, Tree] = {}
    self._after: dict[str, Tree] = {}
    self._before: dict[str, Tree] = {}

  def base(self, root: str) -> Tree:
    """A base tree by its root hash.

    Raises:
      SpecPilotError: it is not there, damaged, or another tree.
    """
    if root not in self._unpacked:
      if root not in self._bases:
        raise SpecPilotError(f"base {root[:16]} is not in the memory")
      tree = sources.unpack(self._bases[root])
      if manifest_of(tree).root_hash != root:
        raise SpecPilotError(f"base {root[:16]}: its tree is another one")
      self._unpacked[root] = tree
    return self._unpacked[root]

  def together(self, base: str, ids: Sequence[str]) -> Tree:
    """The tree of some entries and all that they stand on.

    Raises:
      SpecPilotError: as `before`.
    """
    tree = self.base(base)
    for name in closure(self._records, ids):
      ours = self._records[name].base
      if ours is not None and ours != base:
        raise SpecPilotError(
          f"{name} stands on base {ours[:16]}, not on {base[:16]}"
        )
      if self._patch_of(name):
        tree = self.onto(name, tree, both=True)
    return tree

  def onto(self, name: str, tree: Tree, *, both: bool = False) -> Tree:
    """Another tree with what an entry's patch does to its own.

    Raises:
      MergeError: the tree has changed where the patch does.
      SpecPilotError: as `before`.
    """
    before, after = self.before(name), self.after(name)
    try:
      return merging.merge_trees(before, tree, after, both=both)
    except merging.MergeError as e:
      e.args = (f"{name}: {e}",)
      raise

  def before(self, name: str) -> Tree:
    """Base and dependencies of an entry.

    Raises:
      SpecPilotError: something is missing, or they do not go together.
    """
    if name not in self._before:
      record = self._records[name]
      if record.base is None:
        raise SpecPilotError(f"{name} has no tree")
      self._before[name] = self.together(record.base, record.depends_on)
    return self._before[name]

  def after(self, name: str) -> Tree:
    """Base, dependencies and patch of an entry.

    Raises:
      SpecPilotError: as `before`; a patch that does not fit.
    """
    if name not in self._after:
      patch, before = self._patch_of(name), self.before(name)
      if patch:
        changes = patches.parse(patch, check_of(self._records[name]))
        self._after[name] = patches.apply(before, changes)
      else:
        self._after[name] = before
    return self._after[name]

  def problems(self, name: str) -> list[str]:
    """What of an entry's trees is not as recorded."""
    record = self._records[name]
    if record.base is None:
      return []
    found = []
    try:
      before, after = self.before(name), self.after(name)
    except SpecPilotError as e:
      return [f"{name} does not reproduce: {e}"]
    for what, tree, told in (
      ("base + dependencies", before, record.tree_before),
      ("base + dependencies + patch", after, record.tree_after),
    ):
      made = manifest_of(tree).root_hash
      if made != told:
        found.append(
          f"{name} does not reproduce: {what} gives tree {made[:16]}, recorded"
          f" is {str(told)[:16]}"
        )
    if not found and sources_of(before, after) != dict(record.sources):
      found.append(f"{name}: sources do not name what its patch changes")
    return found


def sources_of(before: Tree, after: Tree) -> dict[str, list[str | None]]:
  """The field `sources` of a record."""
  old, new = manifest_of(before).files, manifest_of(after).files
  return {
    path: [old.get(path), new.get(path)]
    for path in sources.changed(before, after)
  }

"""Which entries do not go together, found by delta debugging.

The method is ddmin (Zeller and Hildebrandt, "Simplifying and isolating
failure-inducing input", 2002), over sets that are closed under dependencies:
an entry is never tried without what it stands on.
"""

from collections.abc import Callable, Mapping, Sequence

from memory import merging, trees
from memory.schema import Record
from memory.store import Store
from specpilot_jax.errors import SpecPilotError


def smallest(
  records: Mapping[str, Record],
  ids: Sequence[str],
  passes: Callable[[tuple[str, ...]], bool],
) -> tuple[str, ...]:
  """A smallest set of entries that fails: without any one of them it passes.

  Args:
    records: of the memory, in order.
    ids: of a set that fails.
    passes: whether a set, with all that it stands on, works; asked at most once
      of each set. An empty set must pass.

  Returns:
    Entries of `ids`, in the order of `records`; the set is smallest in that
    each of them is needed, not in that no other is smaller.

  Raises:
    SpecPilotError: all of them together pass, or none of them fails.
  """
  known: dict[tuple[str, ...], bool] = {}

  def fails(part: Sequence[str]) -> bool:
    whole = tuple(trees.closure(records, part))
    if whole not in known:
      known[whole] = passes(whole)
    return not known[whole]

  left = [name for name in records if name in set(ids)]
  if not fails(left):
    raise SpecPilotError("conflicts: the entries pass together")
  if fails([]):
    raise SpecPilotError("conflicts: it fails without any entry")
  parts = 2
  while len(left) > 1:
    size = -(-len(left) // parts)
    pieces = [left[i : i + size] for i in range(0, len(left), size)]
    rests = [[n for n in left if n not in piece] for piece in pieces]
    smaller = next((p for p in (*pieces, *rests) if p and fails(p)), None)
    if smaller is not None and len(smaller) < len(left):
      parts = 2 if smaller in pieces else max(2, parts - 1)
      left = smaller
    elif parts >= len(left):
      break
    else:
      parts = min(len(left), 2 * parts)
  return tuple(left)


def merges(store: Store, base: str, ids: Sequence[str]) -> bool:
  """Whether the changes of some entries go onto a base together."""
  try:
    store.trees.together(base, ids)
  except merging.MergeError:
    return False
  return True


def note_textual(store: Store, ids: Sequence[str]) -> tuple[str, ...] | None:
  """Logs which of some entries change the same place; None where none do."""
  base = store.base_root
  if merges(store, base, ids):
    return None
  found = smallest(store.records, ids, lambda part: merges(store, base, part))
  store.note_conflict(found, "their patches change the same place")
  return found

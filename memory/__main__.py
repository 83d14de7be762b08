"""The memory: what was proved, and what not to try again.

    python -m memory list [--kind=mechanism|system|negative]
    python -m memory show ID [--sources=DIR]  DIR: writes the entry's sources
    python -m memory verify                   hashes, log, graph, source trees
    python -m memory graph
    python -m memory add --record=FILE [--evidence=FILE,FILE]
        [--patch=FILE | [--before=DIR] --after=DIR]
    python -m memory add --round=DIR          a finished round
    python -m memory add --base=DIR           sources that patches apply to
    python -m memory replay --deployment=FILE [--onto=DIR] [--output=FILE]
        [--holds=gpu,drafter,sampled,batch,fp8]

An id may be cut to any beginning that no other has. --memory=DIR is another
memory than this repository's. `add` with --before and --after takes what
changed between two checkouts to the entry's own dependencies. `replay` takes a
fingerprint or the result.json of a run, says which entries apply, and writes
proposals for `--job=round --agents=replay --proposals=FILE`; where the sources
have moved, it names every file and place that clashes.
Exit status: 0, or 2 for bad input and for a memory that is damaged.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from memory import commands, reading, sources
from memory.store import Store
from specpilot_jax import cli
from specpilot_jax.errors import SpecPilotError

_FLAGS = {
  "list": ("kind",),
  "show": ("sources",),
  "verify": (),
  "graph": (),
  "add": ("record", "patch", "before", "after", "evidence", "round", "base"),
  "replay": ("deployment", "onto", "output", "holds"),
}


def _parse(argv: Sequence[str]) -> tuple[str, list[str], dict[str, str]]:
  """Command, arguments, flags."""
  if not argv or argv[0] not in _FLAGS:
    raise SpecPilotError(
      f"expected a command: {', '.join(_FLAGS)}; --help says more"
    )
  command, rest, given = argv[0], [], {}
  for part in argv[1:]:
    if not part.startswith("--"):
      rest.append(part)
      continue
    name, equals, value = part[2:].partition("=")
    known = (*_FLAGS[command], "memory")
    if name not in known or not equals or not value:
      flags = ", ".join(f"--{flag}=..." for flag in known)
      raise SpecPilotError(f"{command}: {part!r}; flags: {flags}")
    if name in given:
      raise SpecPilotError(f"{command}: --{name} is given twice")
    given[name] = value
  wanted = 1 if command == "show" else 0
  if len(rest) != wanted:
    raise SpecPilotError(
      f"{command}: expected {'one id' if wanted else 'flags alone'}"
    )
  return command, rest, given


def run(argv: Sequence[str]) -> Iterator[str]:
  """The lines that a command line prints.

  Args:
    argv: without the program's name.

  Raises:
    SpecPilotError: bad input, or a memory that is damaged.
  """
  command, rest, given = _parse(argv)

  def path(name: str) -> Path | None:
    return Path(given[name]) if name in given else None

  root = path("memory") or reading.ROOT
  if command == "verify":
    return commands.verify(root)
  store = Store(root)
  if command == "list":
    return commands.list_entries(store, given.get("kind"))
  if command == "graph":
    return commands.graph(store)
  if command == "show":
    folder = path("sources")
    if folder is not None:
      return commands.write_sources(store, rest[0], folder)
    return commands.show(store, rest[0])
  if command == "replay":
    deployment = path("deployment")
    if deployment is None:
      raise SpecPilotError("replay: --deployment=FILE is missing")
    return commands.replay(
      store,
      deployment,
      onto=path("onto") or sources.ROOT,
      holds=tuple(given.get("holds", "gpu,drafter").split(",")),
      output=path("output"),
    )
  return _add(store, given, path)


def _add(
  store: Store, given: dict[str, str], path: Callable[[str], Path | None]
) -> Iterator[str]:
  alone = [name for name in ("round", "base") if name in given]
  if alone and len(given) - ("memory" in given) > 1:
    raise SpecPilotError(f"add: --{alone[0]} takes no other flag")
  if alone:
    take = commands.add_round if alone == ["round"] else commands.add_base
    return take(store, Path(given[alone[0]]))
  record = path("record")
  if record is None:
    raise SpecPilotError("add: --record=FILE, --round=DIR or --base=DIR")
  return commands.add(
    store,
    record,
    patch=path("patch"),
    before=path("before"),
    after=path("after"),
    evidence=[Path(p) for p in given.get("evidence", "").split(",") if p],
  )


def main(argv: list[str]) -> None:
  """Runs a command line, program name first."""
  if {"--help", "-help", "-h"} & set(argv[1:]):
    print((__doc__ or "").strip())
    return
  try:
    for line in run(argv[1:]):
      print(line)
  except SpecPilotError as e:
    cli.fail(e)
  except OSError as e:
    if e.filename is None:
      raise
    cli.fail(f"{e.filename}: {e.strerror}")


if __name__ == "__main__":
  main(sys.argv)

"""Draws what imports what: `python -m scripts.architecture`

Writes docs/architecture.svg from the sources. A box is a package; the modules
that lie in a top package itself are two boxes, those that need its other parts
and those that do not. An arrow goes from who imports to who is imported, at
once when it is loaded, unless a longer way of arrows says the same. Boxes that
import each other, directly or not, stand side by side in one frame. The files
are read, never imported.
"""

import ast
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
COLOURS = {
  "experiments": "#fde9d0",
  "memory": "#e6e0f5",
  "specpilot_jax": "#dcecf9",
  "pallas_kernels": "#dff2e1",
}
"""Of the top packages, the highest first."""

ENTRY, BASE = "entry points", "foundations"
WIDTH, MARGIN, BOX_HEIGHT, ROW_HEIGHT = 1080, 16, 70, 116

Graph = Mapping[str, set[str]]


@dataclasses.dataclass(frozen=True)
class Module:
  """A source file: its name, the folder that it is in, and what it imports."""

  name: str
  folder: str
  imports: frozenset[str]
  summary: str


def modules(root: Path) -> dict[str, Module]:
  """All modules of the packages below a folder, by dotted name."""
  found = {}
  for package in COLOURS:
    for path in sorted((root / package).rglob("*.py")):
      parts = path.relative_to(root).with_suffix("").parts
      name = ".".join(parts).removesuffix(".__init__")
      tree = ast.parse(path.read_text(encoding="utf-8"))
      summary = (ast.get_docstring(tree) or "").partition("\n")[0]
      found[name] = Module(
        name, ".".join(parts[:-1]), frozenset(_imported(tree)), summary
      )
  return found


def _imported(tree: ast.Module) -> Iterator[str]:
  """What is imported at once, not by a function later."""
  for node in tree.body:
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
      for alias in node.names:
        yield f"{node.module}.{alias.name}"


def boxes(found: Mapping[str, Module]) -> dict[str, str]:
  """The box of each module."""
  parents = {m.folder.rpartition(".")[0] for m in found.values()}
  split = {top for top in COLOURS if top in parents}
  box = {name: module.folder for name, module in found.items()}
  for top in split:
    own = [m for m in found.values() if m.folder == top and m.name != top]
    # Who needs another part of the package, or somebody who does.
    needs = {
      m.name
      for m in own
      if any(d.startswith(f"{top}.") for d in _folders(m, found))
    }
    while more := {
      m.name for m in own if m.name not in needs and _known(m, found) & needs
    }:
      needs |= more
    for module in own:
      kind = ENTRY if module.name in needs else BASE
      box[module.name] = f"{top} ({kind})"
    box[top] = f"{top} ({BASE})"
  return box


def _known(module: Module, found: Mapping[str, Module]) -> set[str]:
  """Names of the modules that one imports."""
  names = set()
  for name in module.imports:
    while name and name not in found:
      name = name.rpartition(".")[0]
    names |= {name} if name else set()
  return names - {module.name}


def _folders(module: Module, found: Mapping[str, Module]) -> set[str]:
  return {found[name].folder for name in _known(module, found)}


def graph(found: Mapping[str, Module]) -> dict[str, set[str]]:
  """Boxes, and those that each imports."""
  box = boxes(found)
  out: dict[str, set[str]] = {name: set() for name in sorted(box.values())}
  for name, module in found.items():
    # A package's own file stands for all of it: what it hands on is no need.
    if name != module.folder:
      out[box[name]] |= {box[d] for d in _known(module, found)}
  return {name: to - {name} for name, to in out.items()}


def reachable(arrows: Graph) -> dict[str, set[str]]:
  """All that a box leads to."""
  found = {name: set(to) for name, to in arrows.items()}
  for middle in arrows:
    for name in arrows:
      if middle in found[name]:
        found[name] |= found[middle]
  return found


def circles(arrows: Graph) -> dict[str, frozenset[str]]:
  """Each box with those that it imports and that import it, itself too."""
  far = reachable(arrows)
  return {
    name: frozenset([name, *(n for n in far[name] if name in far[n])])
    for name in arrows
  }


def drawn(arrows: Graph) -> list[tuple[str, str]]:
  """Arrows that no longer way stands for; none within a circle."""
  far, circle = reachable(arrows), circles(arrows)
  return [
    (name, other)
    for name, to in arrows.items()
    for other in sorted(to - circle[name])
    if not any(
      other in far[middle] - circle[middle]
      for middle in far[name] - circle[name]
    )
  ]


def rows(arrows: Graph) -> list[list[str]]:
  """Boxes by height: who is imported stands below all who import it."""
  far, circle = reachable(arrows), circles(arrows)
  height: dict[frozenset[str], int] = {}

  def of(name: str) -> int:
    own = circle[name]
    if own not in height:
      below = {n for peer in own for n in far[peer]} - own
      height[own] = 1 + max(map(of, sorted(below)), default=-1)
    return height[own]

  levels: dict[int, list[str]] = {}
  for name in arrows:
    levels.setdefault(of(name), []).append(name)
  return [
    sorted(levels[level], key=lambda n: (min(circle[n]), n))
    for level in sorted(levels, reverse=True)
  ]


def svg(root: Path = ROOT) -> str:
  """The picture of a checkout."""
  found = modules(root)
  arrows = graph(found)
  places: dict[str, tuple[float, float, float]] = {}
  parts: list[str] = []
  levels = rows(arrows)
  for i, level in enumerate(levels):
    width = min(250.0, (WIDTH - MARGIN) / len(level) - MARGIN)
    gap = (WIDTH - len(level) * width) / (len(level) + 1)
    for j, name in enumerate(level):
      places[name] = gap + j * (width + gap), MARGIN + i * ROW_HEIGHT, width
  for name, other in drawn(arrows):
    parts.append(_arrow(places[name], places[other]))
  for circle in sorted({c for c in circles(arrows).values()}, key=min):
    if len(circle) > 1:
      parts.append(_frame([places[name] for name in sorted(circle)]))
  for name, (x, y, width) in places.items():
    parts.append(_box(name, _summary(name, found), x, y, width))
  height = 2 * MARGIN + (len(levels) - 1) * ROW_HEIGHT + BOX_HEIGHT
  head = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
    ' font-family="sans-serif">\n<title>Who imports whom</title>\n'
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4"'
    ' markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#777"/></marker></defs>\n'
    f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n'
  )
  return head + "".join(f"{part}\n" for part in parts) + "</svg>\n"


def _summary(name: str, found: Mapping[str, Module]) -> str:
  top, _, kind = name.partition(" (")
  if kind == f"{ENTRY})":
    return "Commands, and what puts the parts together."
  if kind:
    return "Configurations, errors, and what all parts share."
  return found[top].summary


def _arrow(
  start: tuple[float, float, float], end: tuple[float, float, float]
) -> str:
  (x1, y1, w1), (x2, y2, w2) = start, end
  x1, y1, x2 = x1 + w1 / 2, y1 + BOX_HEIGHT, x2 + w2 / 2
  bend = (y2 - y1) / 2
  return (
    f'<path d="M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f}'
    f' {y2 - bend:.0f} {x2:.0f} {y2:.0f}" fill="none" stroke="#777"'
    ' stroke-width="1.3" marker-end="url(#tip)"/>'
  )


def _frame(inside: Sequence[tuple[float, float, float]]) -> str:
  x, y = inside[0][0] - 8, inside[0][1] - 8
  width = inside[-1][0] + inside[-1][2] + 8 - x
  return (
    f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}"'
    f' height="{BOX_HEIGHT + 16}" rx="10" fill="none" stroke="#999"'
    ' stroke-dasharray="5 4"/>'
  )


def _box(name: str, summary: str, x: float, y: float, width: float) -> str:
  colour = COLOURS[name.partition(".")[0].partition(" ")[0]]
  lines = _wrapped(summary.partition(". ")[0], int(width / 5.7))
  lines = lines[:3]
  middle = x + width / 2
  size = min(13.0, 1.5 * width / len(name))
  text = (
    f'<text x="{middle:.0f}" y="{y + 18:.0f}" font-size="{size:.1f}"'
    f' font-weight="bold" text-anchor="middle">{escape(name)}</text>'
  )
  for i, line in enumerate(lines):
    text += (
      f'\n<text x="{middle:.0f}" y="{y + 34 + 14 * i:.0f}" font-size="10"'
      f' text-anchor="middle">{escape(line)}</text>'
    )
  return (
    f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}"'
    f' rx="6" fill="{colour}" stroke="#555"/>\n{text}'
  )


def _wrapped(text: str, length: int) -> list[str]:
  lines = [""]
  for word in text.split():
    if lines[-1] and len(lines[-1]) + 1 + len(word) > length:
      lines.append("")
    lines[-1] = f"{lines[-1]} {word}".strip()
  return lines


def main() -> None:
  """Writes the picture."""
  PICTURE.parent.mkdir(exist_ok=True)
  PICTURE.write_text(svg(), encoding="utf-8")


if __name__ == "__main__":
  main()

"""What a report is made of."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Heading:
  """A section's title."""

  text: str


@dataclasses.dataclass(frozen=True)
class Text:
  """A paragraph; `kind` is a class of the style sheet."""

  text: str
  kind: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows of text; `left` aligns all columns left."""

  header: tuple[str, ...]
  rows: tuple[tuple[str, ...], ...]
  left: bool = False


@dataclasses.dataclass(frozen=True)
class Plot:
  """A picture, PNG, and what it shows."""

  caption: str
  png: bytes


Block = Heading | Text | Table | Plot

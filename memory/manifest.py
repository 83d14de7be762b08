"""What a tree of files is, by content."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Manifest:
  """Content hashes of a tree by path.

  >>> one, two = manifest_of({"a": b"1", "b": b""}), manifest_of({"a": b"2"})
  >>> one.differences(two)
  ['a was changed', 'b is missing']

  Attributes:
    files: path to sha256.
  """

  files: Mapping[str, str]

  @property
  def root_hash(self) -> str:
    """sha256 over all paths and hashes."""
    text = json.dumps(sorted(self.files.items()))
    return hashlib.sha256(text.encode()).hexdigest()

  def differences(self, other: "Manifest") -> list[str]:
    """Paths that are not the same in both, each with what is wrong."""
    found = []
    for path in sorted(self.files.keys() | other.files.keys()):
      if path not in other.files:
        found.append(f"{path} is missing")
      elif path not in self.files:
        found.append(f"{path} was added")
      elif self.files[path] != other.files[path]:
        found.append(f"{path} was changed")
    return found


def digest(data: bytes) -> str:
  """sha256 of some bytes, in hexadecimal digits."""
  return hashlib.sha256(data).hexdigest()


def manifest_of(files: Mapping[str, bytes]) -> Manifest:
  """The manifest of files in memory."""
  return Manifest({path: digest(data) for path, data in files.items()})

"""Structured memory: what was proved, kept as patches that replay.

An entry is a record, a patch relative to the entries that it depends on, and
evidence; its id is made from all of that. `store` keeps entries, `reading`
finds what is wrong with a memory, `trees` makes the sources that an entry
stands for, `transfer` tries entries on another deployment, `conflicts` finds
those that do not go together. `python -m memory` is the command line.

>>> memory = Store()
>>> packed = next(
...   entry
...   for entry in memory.current()
...   if entry.record.settings == "weights=w12"
... )
>>> packed.record.kind, packed.record.factor, packed.record.needs
('mechanism', 'kernel', ('gpu',))
>>> "pallas_kernels/w12_matmul.py" in memory.trees.after(packed.id)
True
"""

from memory.reading import Entry, problems, verify
from memory.schema import Deployment, Fingerprint, Record
from memory.store import Store
from memory.transfer import choose, replay

__all__ = [
  "Deployment",
  "Entry",
  "Fingerprint",
  "Record",
  "Store",
  "choose",
  "problems",
  "replay",
  "verify",
]

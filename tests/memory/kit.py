"""A small memory: a base of two files, and entries that stand on others."""

from pathlib import Path

from memory import sources
from memory.store import Store

REGISTRY = sources.REGISTRY
A, B, NEW = (
  "specpilot_jax/decoding/a.py",
  "pallas_kernels/b.py",
  "specpilot_jax/mechanisms/new.py",
)
LINES = b"".join(b"line %d\n" % i for i in range(30))
BASE = {A: LINES, B: LINES, REGISTRY: b"_ALL = (\n)\n"}


def option(name: str) -> dict:
  """The registration of an option, as a record has it."""
  return {
    "name": name,
    "domain": "off|on",
    "default": "off",
    "summary": "an option",
    "factor": "tau",
    "exactness": "token",
    "requires": [],
    "conflicts": [],
  }


def register(tree: dict[str, bytes], name: str) -> dict[str, bytes]:
  text = tree[REGISTRY].replace(
    b"\n)\n", b'\n  Option(name="%s"),\n)\n' % name.encode()
  )
  return tree | {REGISTRY: text}


def edited(tree, path: str, line: int, text: str) -> dict[str, bytes]:
  """The tree with one line of a file replaced."""
  old = b"line %d\n" % line
  assert old in tree[path]
  return dict(tree) | {path: tree[path].replace(old, text.encode() + b"\n")}


def add(
  store: Store, name: str, change, depends_on=(), gain=0.1, **fields
) -> str:
  """Adds a mechanism with an option; `change` makes its tree."""
  before = dict(
    store.trees.together(store.base_root, [store[i].id for i in depends_on])
  )
  after = register(change(before), name)
  return store.add(
    {
      "kind": "mechanism",
      "title": f"mechanism {name}",
      "factor": "tau",
      "settings": f"{name}=on",
      "options": [option(name)],
      "depends_on": depends_on,
      "date": "2026-11-30",
      "deployments": [
        {
          "fingerprint": {"device": "card", "target": "zoo"},
          "status": "observed",
          "gain": gain,
          "evidence": "evidence/figures.json",
        }
      ],
      **fields,
    },
    sources.patch(before, after),
    {"figures.json": b'{"gain": 0.1}\n'},
    tree=after,
  )


def build(root: Path) -> tuple[Store, dict[str, str]]:
  """`first` and `second` are independent, `third` stands on both; a system of
  all, and a negative result."""
  store = Store(root)
  store.add_base(BASE, "abcdef0")
  ids = {}
  ids["first"] = add(store, "first", lambda t: edited(t, A, 3, "first"))
  ids["second"] = add(
    store,
    "second",
    lambda t: edited(t, B, 9, "second") | {NEW: b"x = 1\n"},
    gain=0.3,
  )
  ids["third"] = add(
    store,
    "third",
    lambda t: edited(t, A, 20, "third") | {NEW: b"x = 2\n"},
    [ids["first"], ids["second"]],
    gain=0.2,
  )
  whole = dict(store.trees.after(ids["third"]))
  tied = edited(whole, B, 25, "what ties them together")
  ids["system"] = store.add(
    {
      "kind": "system",
      "title": "all together",
      "depends_on": [ids["third"]],
    },
    sources.patch(whole, tied),
    tree=tied,
  )
  ids["negative"] = store.add(
    {
      "kind": "negative",
      "title": "a product of its own",
      "factor": "kernel",
      "reason": "slower",
      "lessons": ["streams do not reach the rate"],
    }
  )
  return store, ids

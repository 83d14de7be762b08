"""The picture of the packages is that of the sources."""

from scripts import architecture

MODULES = {
  "experiments/__init__.py": '"""What runs."""',
  "experiments/main.py": "from experiments.tools import saw\nimport memory.a",
  "experiments/common.py": "import json",
  "experiments/tools/__init__.py": '"""Saws & planes. And more."""',
  "experiments/tools/saw.py": "from experiments import common, main",
  "memory/__init__.py": '"""Kept."""',
  "memory/a.py": "from specpilot_jax.models import net",
  "specpilot_jax/__init__.py": '"""Engine."""',
  "specpilot_jax/models/__init__.py": '"""Nets."""',
  "specpilot_jax/models/net.py": "import pallas_kernels.dot",
  "pallas_kernels/__init__.py": '"""Kernels."""',
  "pallas_kernels/dot.py": "def later():\n  import experiments.main",
}
ENTRY, BASE = "experiments (entry points)", "experiments (foundations)"


def _write(root):
  for name, text in MODULES.items():
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
  return architecture.modules(root)


def test_the_picture_is_of_these_sources():
  assert architecture.PICTURE.read_text() == architecture.svg(), (
    "draw it again: python -m scripts.architecture"
  )


def test_arrows_are_imports_that_no_longer_way_stands_for(tmp_path):
  arrows = architecture.graph(_write(tmp_path))
  assert arrows[ENTRY] == {"experiments.tools", "memory"}
  assert arrows["experiments.tools"] == {BASE, ENTRY}
  assert arrows["pallas_kernels"] == set()  # A function's import is for later.
  # The memory stands for what lies behind it.
  assert set(architecture.drawn(arrows)) == {
    (ENTRY, "memory"),
    ("experiments.tools", BASE),
    ("memory", "specpilot_jax.models"),
    ("specpilot_jax.models", "pallas_kernels"),
  }


def test_who_is_imported_stands_below_and_circles_side_by_side(tmp_path):
  levels = architecture.rows(architecture.graph(_write(tmp_path)))
  assert levels[0] == [ENTRY, "experiments.tools"]
  height = {name: -i for i, level in enumerate(levels) for name in level}
  assert height["memory"] > height["specpilot_jax.models"]
  assert height["specpilot_jax.models"] > height["pallas_kernels"]


def test_a_picture_has_every_box_and_a_frame_around_circles(tmp_path):
  found = _write(tmp_path)
  text = architecture.svg(tmp_path)
  for name in architecture.graph(found):
    assert f">{name}</text>" in text
  assert "Saws &amp; planes" in text and "And more" not in text
  assert text.count("stroke-dasharray") == 1

"""The registry: stock is its defaults, and nothing is left out."""

import dataclasses
from typing import Any

from absl.testing import parameterized

from specpilot_jax.configs import SystemConfig
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.mechanisms import registry

LAW = registry.Option(
  name="acceptance",
  summary="needs two drafts, and no blocks",
  domain=registry.Choice(values=("match", "rejection")),
  factor="tau",
  exactness="distribution",
  requires=("num_drafts=2",),
)
AGAINST = dataclasses.replace(LAW, requires=(), conflicts=("num_drafts=2",))


class RegistryTest(parameterized.TestCase):
  def test_stock_is_every_default(self):
    defaults: dict[str, Any] = {
      name: o.default for name, o in registry.OPTIONS.items()
    }
    assert SystemConfig(**defaults) == SystemConfig()

  def test_every_field_has_an_option(self):
    fields = [field.name for field in dataclasses.fields(SystemConfig)]
    assert sorted(fields) == sorted(registry.OPTIONS)
    assert all(name == o.name for name, o in registry.OPTIONS.items())

  @parameterized.parameters(
    ("", SystemConfig()),
    (" , ", SystemConfig()),
    ("num_drafts=5", SystemConfig(num_drafts=5)),
    ("num_drafts=block", SystemConfig()),
    (
      " acceptance = rejection ,num_drafts=1",
      SystemConfig(acceptance="rejection", num_drafts=1),
    ),
    ("tree=chain,node_budget=16", SystemConfig(node_budget=16)),
    (
      "tree=best_first,node_budget=48,tree_depth=9",
      SystemConfig(tree="best_first", node_budget=48, tree_depth=9),
    ),
    ("tree=marginal,node_budget=default", SystemConfig(tree="marginal")),
    (
      "verification=two_level,level_one_passes=2,view=scaled",
      SystemConfig(verification="two_level", level_one_passes=2, view="scaled"),
    ),
    (
      "weights=w12,drafter_view=truncated",
      SystemConfig(weights="w12", drafter_view="truncated"),
    ),
    (
      "shared_budget=on,shared_nodes=64,dynamic_draft=on,prompt_admission=on",
      SystemConfig(
        shared_budget="on",
        shared_nodes=64,
        dynamic_draft="on",
        prompt_admission="on",
      ),
    ),
    ("shared_budget=on,shared_nodes=load", SystemConfig(shared_budget="on")),
  )
  def test_parses(self, text, expected):
    system = registry.parse_options(text)
    assert system == expected
    written = registry.assignments(system)
    joined = ",".join(f"{name}={value}" for name, value in written.items())
    assert registry.parse_options(joined) == expected

  @parameterized.parameters(
    ("num_draft=5", "'num_draft'.*acceptance, num_drafts"),
    ("num_drafts", "'num_drafts' is not of the form option=value"),
    ("num_drafts=0", "num_drafts='0': expected block or .* from 1"),
    ("num_drafts=-1", "num_drafts='-1'"),
    ("num_drafts=1_0", "num_drafts='1_0'"),
    ("num_drafts=٣", "num_drafts="),
    ("num_drafts=", "num_drafts=''"),
    ("acceptance=greedy", "acceptance='greedy': expected match|rejection"),
    ("num_drafts=3,num_drafts=3", "num_drafts is set twice"),
    ("tree=wide", "tree='wide': expected chain.best_first.marginal"),
    ("node_budget=129", "expected default or a whole number from 1 to 128"),
    ("node_budget=0", "node_budget='0'"),
    # A chain has one limit, and so has a tree.
    ("tree=best_first,num_drafts=5", "num_drafts=5 requires tree=chain"),
    ("num_drafts=5,node_budget=6", "node_budget=6 requires num_drafts=block"),
    ("tree_depth=5", "tree_depth=5 conflicts with tree=chain"),
    ("level_one_passes=0", "='0': expected a whole number from 1"),
    ("view=scaled", "view=scaled conflicts with verification=one_level"),
    ("drafter_view=scaled", "drafter_view=scaled requires weights=w12"),
    ("verification=auto,level_one_passes=2", "=2 conflicts with .*=auto"),
    ("shared_nodes=8", "shared_nodes=8 conflicts with shared_budget=off"),
    ("shared_budget=yes", "shared_budget='yes': expected off.on"),
    (
      "dynamic_draft=on,verification=two_level",
      "dynamic_draft=on requires verification=one_level",
    ),
    ("verification=three", "expected one_level.two_level.auto"),
  )
  def test_refuses(self, text, message):
    with self.assertRaisesRegex(SpecPilotError, message) as caught:
      registry.parse_options(text)
    assert "\n" not in str(caught.exception)

  def test_sweep(self):
    assert registry.parse_sweep("", SystemConfig()) == {}
    base = SystemConfig(tree="best_first", node_budget=5, weights="w12")
    assert registry.parse_sweep(" node_budget = 8| 16|default", base) == {
      "node_budget=8": dataclasses.replace(base, node_budget=8),
      "node_budget=16": dataclasses.replace(base, node_budget=16),
      "node_budget=default": dataclasses.replace(base, node_budget=None),
    }

  def test_requires(self):
    options = dict(registry.OPTIONS) | {"acceptance": LAW}
    with self.assertRaisesRegex(SpecPilotError, "requires num_drafts=2"):
      registry.parse_options("acceptance=rejection", options)
    registry.parse_options("acceptance=rejection,num_drafts=2", options)
    # The default needs nothing.
    registry.parse_options("acceptance=match", options)

  def test_conflicts(self):
    options = dict(registry.OPTIONS) | {"acceptance": AGAINST}
    registry.parse_options("acceptance=rejection", options)
    with self.assertRaisesRegex(SpecPilotError, "conflicts with num_drafts=2"):
      registry.parse_options("num_drafts=2,acceptance=rejection", options)

  def test_changed(self):
    assert registry.changed(SystemConfig()) == {}
    assert registry.changed(SystemConfig(num_drafts=2)) == {"num_drafts": "2"}

  def test_for_batches(self):
    system = SystemConfig(tree="best_first", prompt_admission="on")
    assert registry.needs_batch(system) == ["prompt_admission"]
    assert registry.needs_batch(SystemConfig()) == []
    for name in registry.OPTIONS:
      settings: dict[str, Any] = {name: "on"}
      try:
        system = SystemConfig(**settings)
      except SpecPilotError:
        continue  # another domain
      assert registry.needs_batch(system) == [name]
      with self.assertRaisesRegex(SpecPilotError, f"{name}=on is for several"):
        system.check_alone()

  def test_descriptions(self):
    for option in registry.OPTIONS.values():
      assert option.name in option.describe()
      assert "\n" not in option.describe()

"""The shape of a batch's step, and faults that its checks must see."""

import collections
import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from specpilot_jax.configs import SystemConfig
from specpilot_jax.decoding.batch import step as batch_step
from specpilot_jax.decoding.batch.engine import BatchEngine, StepLimits
from specpilot_jax.decoding.batch.scheduler import Chunk, Request
from specpilot_jax.decoding.sampling import Features, SamplingParams
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import packed as packed_lib
from tests.decoding import batch_kit, kit
from tests.decoding.batch_kit import BASE, GREEDY, Run

GREEDY_ONLY = Features(greedy=True, filters=False, penalties=False)


def equations(jaxpr):
  """All of a computation, those of inner ones too."""
  for equation in jaxpr.eqns:
    for value in equation.params.values():
      for inner in jax.tree.leaves(
        value, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
      ):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          yield from equations(inner)
    yield equation


def products(jaxpr) -> collections.Counter:
  """Every product of a computation as (batch, rows or columns, inner) sizes."""
  found = collections.Counter()
  for equation in equations(jaxpr):
    if equation.primitive.name == "dot_general":
      left, right = (v.aval.shape for v in equation.invars)
      (over, _), (batch, _) = equation.params["dimension_numbers"]
      inner = int(np.prod([left[i] for i in over]))
      outer = int(np.prod([left[i] for i in batch]))
      sides = sorted(int(np.prod(x)) // (inner * outer) for x in (left, right))
      found[outer, *sides, inner] += 1
  return found


def one_step(engine) -> collections.Counter:
  """Of a single engine."""
  step = jax.make_jaxpr(engine.fns.step)
  carry = jax.eval_shape(engine.fresh_carry)
  return products(step(engine.params, carry, engine.request(GREEDY)).jaxpr)


def batch_steps(engine: BatchEngine, bucket: int, rows=None):
  """Of a batch engine's step over so many slots."""
  return products(batch_jaxpr(engine, engine._one.fns, bucket, rows))


def batch_jaxpr(engine: BatchEngine, one, bucket: int, rows=None):
  """Of a step with the functions of one request, over so many slots."""
  fns = batch_step.BatchFns(one)
  index = engine._index(range(bucket))
  policy = engine._one.fns.policy
  limits = StepLimits().of_slots(
    index, engine.slots, policy.rows, policy.path - 1
  )
  whole = None if bucket == engine.slots else index
  listed = np.ones(bucket, bool)
  traced = jax.make_jaxpr(lambda *given: fns.step(*given, rows=rows))(
    engine._one.params, engine._slots, whole, listed, limits, (), None
  )
  return traced.jaxpr


class StructureTest(kit.Float64TestCase):
  def test_a_batch_of_one_is_the_single_step(self):
    """The same products, each of the same size, as often."""
    for kind in ("chain", "none"):
      batch = batch_kit.make(kind, 1)
      self.assertEqual(batch_steps(batch, 1), one_step(batch._one))

  @parameterized.named_parameters(("dense", None), ("packed", 16))
  def test_weights_are_read_once(self, rows):
    """Every product with weights has the rows of all requests."""
    batch = batch_kit.make("chain", 4)
    found = batch_steps(batch, 4, rows)
    alone = one_step(batch._one)
    down = BASE.hidden_size, BASE.intermediate_size
    in_all = 4 * batch.nodes if rows is None else rows
    in_all += -in_all % 16  # columns that a CPU computes at once
    expected = (1, *sorted((in_all, down[0])), down[1])
    self.assertEqual(found[expected], BASE.num_layers)
    # And no product is there once for each request.
    self.assertEqual(sum(found.values()), sum(alone.values()))

  def test_projections_are_not_put_in_order(self):
    """A convolution reads rows of a packed pass where they are."""
    batch = batch_kit.make("chain", 4)
    width = (
      BASE.gdn_conv_dim + BASE.gdn_value_dim + 2 * (BASE.gdn_num_value_heads)
    )
    shapes = {
      variable.aval.shape
      for equation in equations(batch_jaxpr(batch, batch._one.fns, 4, 16))
      for variable in equation.outvars
    }
    self.assertIn((16, width), shapes)
    self.assertNotIn((4, batch.nodes, width), shapes)

  def test_rows_without_filters_are_not_sorted(self):
    """But for so many at once, in a loop over those that have some."""
    batch = batch_kit.make("chain", 4)
    for filters in (True, False):
      features = Features(greedy=False, filters=filters, penalties=False)
      one = dataclasses.replace(batch._one.fns, features=features)
      sorts = {
        equation.invars[0].aval.shape
        for equation in equations(batch_jaxpr(batch, one, 4))
        if equation.primitive.name == "sort"
        and equation.invars[0].aval.shape[-1] == BASE.vocab_size
      }
      rows = {int(np.prod(shape[:-1])) for shape in sorts}
      self.assertEqual(rows, {batch_step.FILTERED_ROWS} if filters else set())


class Shifted:
  """Something done to the wrong request, as a patch."""

  @staticmethod
  def rows_of_a_mate():
    right = packed_lib.Packed.by_request

    def by_request(self, x):
      return jnp.roll(right(self, x), 1, axis=0)

    return mock.patch.object(packed_lib.Packed, "by_request", by_request)

  @staticmethod
  def commit_to_another_slot():
    right = batch_step.BatchFns.step

    def step(self, *args, **settings):
      slots, out = right(self, *args, **settings)
      target = jax.tree.map(
        lambda x: jnp.roll(x, 1, axis=0), slots.carry.target
      )
      carry = dataclasses.replace(slots.carry, target=target)
      return dataclasses.replace(slots, carry=carry), out

    return mock.patch.object(batch_step.BatchFns, "step", step)

  @staticmethod
  def noise_keyed_by_slot():
    right = packed_lib.Packed.spread

    def spread(self, x):
      if x.dtype == jnp.uint32:  # the seeds
        x = jnp.arange(x.shape[0], dtype=x.dtype)
      return right(self, x)

    return mock.patch.object(packed_lib.Packed, "spread", spread)

  @staticmethod
  def state_left_in_the_slot():
    right = batch_step.BatchFns.admit

    def admit(self, slots, slot, *args):
      fresh = right(self, slots, slot, *args)
      layers = tuple(
        type(new)(**{**vars(new), "conv": old.conv})
        if hasattr(new, "conv")
        else new
        for new, old in zip(
          fresh.carry.target.layers, slots.carry.target.layers, strict=True
        )
      )
      target = dataclasses.replace(fresh.carry.target, layers=layers)
      carry = dataclasses.replace(fresh.carry, target=target)
      return dataclasses.replace(fresh, carry=carry)

    return mock.patch.object(batch_step.BatchFns, "admit", admit)

  @staticmethod
  def nothing():
    return mock.patch.object(batch_step, "_at", batch_step._at)


class FaultsTest(kit.Float64TestCase):
  @parameterized.named_parameters(
    ("rows_of_a_mate", "rows_of_a_mate", False),
    ("commit_to_another_slot", "commit_to_another_slot", False),
    ("noise_keyed_by_slot", "noise_keyed_by_slot", True),
    ("state_left_in_the_slot", "state_left_in_the_slot", False),
    ("nothing", "nothing", True),
  )
  def test_fault(self, name, sampled):
    references = batch_kit.references(6, mixed=sampled)
    like = None if "left" in name else batch_kit.engine("none", 2)
    with getattr(Shifted, name)():
      engine = batch_kit.make("none", 2, like=like)
      engine.features = batch_kit.EVERYTHING if sampled else GREEDY_ONLY
      run = Run(engine, references)
      if name == "nothing":
        run.finished()
        return
      with self.assertRaises(kit.Mismatch) as caught:
        run.finished()
    self.assertEqual(caught.exception.check, "tokens")


class RefusalTest(kit.Float64TestCase):
  def test_refusals(self):
    engine = batch_kit.make("chain", 2, rider_chunk=4)
    engine.scripts["a"] = dict(mode="none", reference=[0])

    def request(**changes):
      fields: dict[str, Any] = dict(id="a", prompt=[1, 2, 3], max_tokens=4)
      fields |= changes
      return Request(**fields)

    engine.admit(0, request())
    for line, call in (
      ("slot 0 has a request", lambda: engine.admit(0, request())),
      ("outside the vocabulary", lambda: engine.admit(1, request(prompt=[99]))),
      ("is empty", lambda: engine.admit(1, request(prompt=[]))),
      ("no room", lambda: engine.admit(1, request(prompt=[1] * 64))),
      ("payload", lambda: engine.admit(1, request(payload=3))),
      ("not read its prompt", lambda: engine.step([0])),
      ("no request", lambda: engine.step([1])),
      ("must follow", lambda: engine.prefill(0, Chunk(1, 1))),
      ("must follow", lambda: engine.prefill(0, Chunk(0, 3))),
      ("no request", lambda: engine.prefill(1, Chunk(0, 1))),
      ("without requests", engine.warm_up),
      (
        "need a tokenizer",
        lambda: engine.admit(1, request(payload=SamplingParams(stop=("x",)))),
      ),
    ):
      with self.assertRaisesRegex(SpecPilotError, line):
        call()
    self.assertEqual(engine.free_slots, (1,))
    # A call that fails has read nothing, and taken nothing.
    with mock.patch.object(engine, "_prefill", side_effect=ValueError):
      with self.assertRaises(ValueError):
        engine.prefill(0, Chunk(0, 2))
    engine.prefill(0, Chunk(0, 2))
    with mock.patch.object(
      engine, "_step", return_value=mock.Mock(side_effect=ValueError)
    ):
      with self.assertRaises(ValueError):
        engine.step([0])
    self.assertIsNotNone(engine._slots)
    # A pass over all slots, and one over as many as are stepped.
    self.assertEqual(engine._index([0]).tolist(), [0, 1])
    few = batch_kit.make("none", 4, (1, 2, 4))
    self.assertEqual(few._index([2]).tolist(), [2])
    self.assertEqual(few._index([2], 2).tolist(), [2, 4])
    for line, limits in (
      ("rows=1", StepLimits(rows=1)),
      ("numbers from 1", StepLimits(nodes=[0, 1])),
      ("numbers from 0", StepLimits(depth=[1])),
      ("must fit", StepLimits(rows=3)),
    ):
      with self.assertRaisesRegex(SpecPilotError, line):
        engine.step([0], limits)

  def test_settings(self):
    target = kit.build(BASE, "float64")
    cases: list[tuple[str, dict[str, Any]]] = [
      ("slots must be", dict(slots=0)),
      ("rider_chunk must be", dict(rider_chunk=1)),
      ("rider_chunk must be", dict(rider_chunk=100)),
      ("slot_buckets", dict(slots=4, slot_buckets=(1, 2))),
      (
        "one request at a time",
        dict(system=SystemConfig(verification="two_level")),
      ),
    ]
    for line, settings in cases:
      with self.assertRaisesRegex(SpecPilotError, line):
        BatchEngine(target, **settings)

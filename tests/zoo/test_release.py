"""What ships: weights that load, a drafter that drafts, and its controls."""

import dataclasses
import hashlib
import json
import pathlib
import shutil
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from absl.testing import absltest, parameterized
from flax import nnx

from specpilot_jax import loading
from specpilot_jax.checkpoints import (
  conversion,
  hf,
  load_checkpoint,
  w12,
  w12_file,
)
from specpilot_jax.checkpoints import drafter as drafter_io
from specpilot_jax.decoding.commit import commit
from specpilot_jax.decoding.draft import Lattice
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import state as state_lib
from specpilot_jax.models.drafters import learned
from specpilot_jax.models.drafters.dflash import DFlash, DFlashDrafter
from specpilot_jax.zoo import measures, recipes, store
from tests.checkpoints.builders import BFLOAT16
from tests.decoding import kit
from tests.notes import in_full_form, note

PROMPTS, TOKENS = 8, 128

FOLDERS = {
  folder.name: folder
  for folder in (store.TARGET, store.DFLASH, store.SMOLLM2_DFLASH)
}
SHIPPED = [
  recipe
  for recipe, how in recipes.DRAFTERS.items()
  if store.DRAFTERS[how.target][how.config.kind].is_dir()
]
"""Recipes whose drafters ship."""
TRAINED = json.loads(
  (pathlib.Path(__file__).parents[1] / "data/zoo_bf16.json").read_text()
)
"""SHA-256 of the bfloat16 files that training wrote and of their tensors."""


def sha256(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()


def size_mb(folder: pathlib.Path) -> float:
  return sum(f.stat().st_size for f in folder.rglob("*")) / 1e6


class SelfDrafter:
  """A control: the target drafts for itself, token by token."""

  name = "self"
  variable_length = False
  taps = ()

  def __init__(self, target, num_slots=6):
    self.num_slots = num_slots
    self.config = target.config
    self.vocab_size = target.config.vocab_size
    self._graphdef, self.params = nnx.split(target)
    self._dtype = target.dtype

  def init_context(self, capacity):
    return state_lib.init_state(self.config, capacity + 8, self._dtype)

  def _run(self, params, state, tokens, count):
    model = nnx.merge(self._graphdef, params)
    size = tokens.shape[0]
    out = model(state_lib.run_of(tokens, count, prefill=False), state)
    path = jnp.arange(size, dtype=jnp.int32)
    return model.logits(out.hidden), commit(state, out.stash, path, count)

  def extend(self, params, context, tokens, taps, start, count):
    del taps, start
    return self._run(params, context, tokens, count)[1]

  def draft(self, params, context, anchor, position):
    del position

    def step(carry, _):
      state, token = carry
      logits, state = self._run(params, state, token[None], jnp.int32(1))
      token = jnp.argmax(logits[0]).astype(jnp.int32)
      return (state, token), token

    _, tokens = jax.lax.scan(
      step, (context, anchor), None, length=self.num_slots
    )
    return Lattice(
      tokens=tokens[:, None],
      scores=jnp.zeros((self.num_slots, 1), jnp.float32),
      count=jnp.int32(self.num_slots),
    )


class MaskedAnchor(DFlashDrafter):
  """A control: the drafter is not told the last committed token."""

  def draft(self, params, context, anchor, position):
    mask = jnp.full_like(anchor, self.config.mask_token_id)
    return super().draft(params, context, mask, position)


class ShippedTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.scratch = pathlib.Path(scratch.name)

  def test_sizes(self):
    self.assertLess(size_mb(store.TARGET), 18)
    self.assertLess(size_mb(store.DFLASH), 5)
    self.assertLess(size_mb(store.SMOLLM2_DFLASH), 6)
    for folder in FOLDERS.values():
      self.assertFalse((folder / hf.WEIGHTS).exists())

  @parameterized.parameters(*FOLDERS)
  def test_weights_are_those_that_were_trained(self, name):
    tensors = w12_file.load(FOLDERS[name] / w12_file.WEIGHTS)
    self.assertEqual(
      {tensor: sha256(array.tobytes()) for tensor, array in tensors.items()},
      TRAINED[name]["tensors"],
    )
    self.assertEqual({a.dtype for a in tensors.values()}, {np.dtype(BFLOAT16)})
    # The file is what the same tensors are written as.
    path = self.scratch / w12_file.WEIGHTS
    w12_file.save(path, tensors)
    shipped = (FOLDERS[name] / w12_file.WEIGHTS).read_bytes()
    self.assertEqual(path.read_bytes(), shipped)

  @parameterized.parameters(store.DFLASH, store.SMOLLM2_DFLASH)
  def test_drafters_in_the_released_layout(self, shipped):
    folder = self.scratch / shipped.name
    drafter_io.save(folder, drafter_io.load(shipped, "bfloat16"))
    self.assertEqual(
      sha256((folder / drafter_io.WEIGHTS).read_bytes()),
      TRAINED[shipped.name]["file_sha256"],
    )
    drafter_io.load(folder, "bfloat16")

  def test_size_reports(self):
    for name, folder in FOLDERS.items():
      with w12_file.opened(folder / w12_file.WEIGHTS) as file:
        report = w12.size_report({m: file.matrix(m) for m in file.matrices()})
      note(f"zoo {name}: {report.total}")
      self.assertLess(report.total.bits_per_weight, 12.15)

  def test_target_is_the_recipe_in_bfloat16(self):
    zoo = load_checkpoint("zoo")
    self.assertEqual(
      dataclasses.replace(zoo.config, tokenizer_size=None), recipes.TARGET
    )
    self.assertEqual(
      {a.dtype for a in zoo.params.values()}, {np.dtype(BFLOAT16)}
    )
    assert zoo.tokenizer is not None
    self.assertEqual(zoo.tokenizer.size, recipes.VOCABULARY)
    self.assertEqual(zoo.tokenizer.eos_token_ids, (recipes.END_ID,))
    self.assertFalse(zoo.tokenizer.has_chat_template)
    text = "def f(naïve):\n\treturn 1234  # 你好\n"
    self.assertEqual(zoo.tokenizer.decode(zoo.tokenizer.encode(text)), text)

  @parameterized.parameters(*SHIPPED)
  def test_drafter_is_the_recipe(self, name):
    recipe = recipes.DRAFTERS[name]
    config = recipe.config
    folder = store.DRAFTERS[recipe.target][config.kind]
    model = drafter_io.load(folder, "bfloat16")
    self.assertEqual(
      dataclasses.replace(model.config, name=config.name), config
    )
    if recipe.target == "zoo":
      self.assertLess(size_mb(folder), 5)

  def test_a_drafter_that_does_not_ship(self):
    target = loading.load_target("zoo", "float32").target
    absent = {"dflash2": self.scratch / "dflash2"}
    with mock.patch.dict(loading._OWN_DRAFTERS, {"zoo": absent}):
      for make in (loading.make_drafter, self.configure):
        with self.assertRaisesRegex(
          SpecPilotError, "dflash2: config.json is missing"
        ) as caught:
          make("dflash2", target)
        self.assertLen(str(caught.exception).splitlines(), 1)
        with self.assertRaisesRegex(
          SpecPilotError, "zoo has no dspark drafter of its own"
        ):
          make("dspark", target)

  def configure(self, name, target):
    return loading.drafter_config(name, target.config)

  def test_prompts(self):
    zoo = load_checkpoint("zoo")
    prompts = store.prompts()
    self.assertLen(prompts, 128)
    assert zoo.tokenizer is not None
    for prompt in prompts:
      self.assertEqual(set(prompt), {"source", "licence", "text"})
      self.assertLen(zoo.tokenizer.encode(prompt["text"]), 200)

  def test_drafters_by_name(self):
    target = loading.load_target("zoo", "float32").target
    self.assertEqual(loading.default_drafter(target.config), "dflash")
    self.assertIsInstance(
      loading.make_drafter(str(store.DFLASH), target), DFlashDrafter
    )
    smollm2 = dataclasses.replace(target.config, name="SmolLM2-135M")
    self.assertEqual(loading.default_drafter(smollm2), "dflash")
    with self.assertRaisesRegex(SpecPilotError, "vocab_size is 49152"):
      loading.make_drafter(str(store.SMOLLM2_DFLASH), target)
    other = dataclasses.replace(target.config, name="other")
    self.assertEqual(loading.default_drafter(other), "prompt_lookup")
    with self.assertRaisesRegex(SpecPilotError, "neither a known name"):
      loading.make_drafter("no-such-drafter", target)

  @in_full_form
  def test_drafter_and_its_controls(self):
    self.enterContext(kit.quick_compilation())
    target = loading.load_target("zoo", "float32").target
    tokenizer = load_checkpoint("zoo").tokenizer
    assert tokenizer is not None
    prompts = [tokenizer.encode(p["text"]) for p in store.prompts()[3:]]

    def tau(drafter):
      outputs = measures.decode(
        target,
        drafter,
        prompts[:PROMPTS],
        temperature=0.0,
        rule="match",
        max_tokens=TOKENS,
      )
      found = measures.acceptance(outputs)
      return found["tau_with_loops"], outputs

    model = drafter_io.load(store.DFLASH, "float32")
    stock, outputs = tau(DFlashDrafter(model, target))
    shifted_drafter = DFlashDrafter(model, target)
    shifted_drafter.taps = tuple(t + 1 for t in shifted_drafter.taps)
    shifted, _ = tau(shifted_drafter)
    masked, _ = tau(MaskedAnchor(model, target))
    _, own = tau(SelfDrafter(target))
    note(
      f"zoo dflash at T=0, {PROMPTS} prompts: tau {stock}, taps shifted by one"
      f" layer {shifted}, mask in slot 0 {masked}"
    )
    self.assertGreater(stock, 2.0)
    self.assertLess(shifted, 0.9 * stock)
    self.assertLess(masked, 0.6 * stock)
    for output, theirs in zip(own, outputs, strict=True):
      self.assertEqual(output.token_ids, theirs.token_ids)
      steps = output.metrics
      self.assertEqual(steps.accepted_per_step, steps.drafted_per_step)


class ReleasedLayoutTest(parameterized.TestCase):
  """Drafters in bfloat16, and the same in W12."""

  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.folder = pathlib.Path(scratch.name) / "drafter"

  def copy(self, encode=False):
    if encode:
      shutil.copytree(store.DFLASH, self.folder)
    else:
      drafter_io.save(self.folder, drafter_io.load(store.DFLASH, "bfloat16"))

  def edit_config(self, **fields):
    path = self.folder / drafter_io.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))

  def edit_tensors(self, edit):
    encoded = self.folder / w12_file.WEIGHTS
    if encoded.exists():
      tensors = w12_file.load(encoded)
      edit(tensors)
      w12_file.save(encoded, tensors)
      return
    path = self.folder / drafter_io.WEIGHTS
    tensors = safetensors.numpy.load_file(path)
    edit(tensors)
    safetensors.numpy.save_file(tensors, path)

  def refused(self, pattern):
    with self.assertRaisesRegex(SpecPilotError, pattern) as caught:
      drafter_io.load(self.folder, "bfloat16")
    self.assertLen(str(caught.exception).splitlines(), 1)

  def test_round_trip_in_w12(self):
    model = DFlash(recipes.DFLASH, jnp.bfloat16, nnx.Rngs(7))
    drafter_io.save(self.folder, model, encode=True)
    self.assertEqual(
      {path.name for path in self.folder.iterdir()},
      {drafter_io.CONFIG, w12_file.WEIGHTS},
    )
    self.assert_same(model, drafter_io.load(self.folder, "bfloat16"))

  def assert_same(self, model, back):
    for a, b in zip(
      jax.tree.leaves(nnx.split(model)[1]),
      jax.tree.leaves(nnx.split(back)[1]),
      strict=True,
    ):
      np.testing.assert_array_equal(a, b)

  @parameterized.product(
    config=(recipes.DFLASH2, recipes.DSPARK), encode=(False, True)
  )
  def test_round_trip_of_others(self, config, encode):
    model = learned.module(config, jnp.bfloat16, nnx.Rngs(7))
    drafter_io.save(self.folder, model, encode=encode)
    if encode:
      shapes = w12_file.load(self.folder / w12_file.WEIGHTS)
    else:
      shapes = safetensors.numpy.load_file(self.folder / drafter_io.WEIGHTS)
    shapes = {name: array.shape for name, array in shapes.items()}
    own = (
      {
        "candidate_selector.predecessor_codebook": (4096, 64),
        "candidate_selector.successor_codebook": (4096, 64),
        "candidate_selector.hidden_projection.weight": (64, 320),
      }
      | {
        f"layers.{i}.{conv}.{name}": shape
        for i in range(2)
        for conv in ("attention_conv", "mlp_conv")
        for name, shape in (
          ("base_kernel", (2, 2, 320)),
          ("kernel_projection.weight", (80, 320)),
        )
      }
      if config is recipes.DFLASH2
      else {
        "markov_head.markov_w1.weight": (4096, 64),
        "markov_head.markov_w2.weight": (4096, 64),
        "confidence_head.proj.weight": (1, 384),
        "confidence_head.proj.bias": (1,),
      }
    )
    self.assertEqual({n: shapes[n] for n in own}, own)
    self.assertLen(shapes, 11 * 2 + 3 + len(own))
    back = drafter_io.load(self.folder, "bfloat16")
    self.assertEqual(dataclasses.replace(back.config, name=config.name), config)
    self.assert_same(model, back)

  def test_round_trip(self):
    model = DFlash(recipes.DFLASH, jnp.bfloat16, nnx.Rngs(7))
    drafter_io.save(self.folder, model)
    names = set(safetensors.numpy.load_file(self.folder / drafter_io.WEIGHTS))
    # 11 tensors per layer, fc and two norms: the released drafters' names.
    self.assertLen(names, 11 * recipes.DFLASH.num_layers + 3)
    self.assertContainsSubset(
      {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "layers.1.self_attn.k_proj.weight",
        "layers.1.self_attn.q_norm.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.post_attention_layernorm.weight",
      },
      names,
    )
    self.assert_same(model, drafter_io.load(self.folder, "bfloat16"))

  @parameterized.parameters(
    ({"surprise": 1}, "unknown config field surprise"),
    ({"dflash_config": {"surprise": 1}}, "dflash_config.surprise"),
    ({"dtype": "float16"}, "float16"),
    ({"is_causal": True}, "is_causal=True"),
    ({"rope_parameters": {"rope_type": "linear"}}, "rope_type 'linear'"),
    ({"hidden_size": None}, "'hidden_size' is missing"),
    ({"num_target_layers": 3}, "target layer"),
    ({"hidden_size": 640}, "shape"),
  )
  def test_refused_configs(self, fields, pattern):
    self.copy()
    self.edit_config(**fields)
    self.refused(pattern)

  @parameterized.parameters(
    (lambda t: t.pop("fc.weight"), "'fc.weight' is missing"),
    (lambda t: t.update(extra=t["fc.weight"]), "unknown tensor 'extra'"),
    (
      lambda t: t.update({"norm.weight": t["norm.weight"].astype(np.float16)}),
      "float16",
    ),
    (
      lambda t: t.update({"norm.weight": t["norm.weight"] * np.nan}),
      "NaN",
    ),
  )
  def test_refused_tensors(self, edit, pattern):
    for encode in (False, True):
      with self.subTest(encode=encode):
        self.copy(encode)
        self.edit_tensors(edit)
        self.refused(pattern)
        shutil.rmtree(self.folder)

  def test_damaged_file(self):
    self.copy()
    path = self.folder / drafter_io.WEIGHTS
    path.write_bytes(path.read_bytes()[:1000])
    self.refused("model.safetensors: damaged")
    path.unlink()
    self.refused("model.safetensors is missing, and model.w12.safetensors too")
    self.folder.joinpath(drafter_io.CONFIG).unlink()
    self.folder.rmdir()
    self.copy(encode=True)
    path.touch()
    self.refused("both model.safetensors and model.w12.safetensors are there")
    path.unlink()
    encoded = self.folder / w12_file.WEIGHTS
    encoded.write_bytes(encoded.read_bytes()[:1000])
    self.refused("model.w12.safetensors: truncated or not safetensors")


class ConvertTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.output = pathlib.Path(scratch.name) / "out"

  @parameterized.parameters(*conversion.FORMATS)
  def test_zoo(self, kind):
    conversion.convert("zoo", str(self.output), kind, verify=True)
    back, zoo = load_checkpoint(self.output), load_checkpoint("zoo")
    self.assertIsNone(conversion.different(back.params, zoo.params))
    assert back.tokenizer is not None and zoo.tokenizer is not None
    self.assertEqual(back.tokenizer.files, zoo.tokenizer.files)
    self.assertEqual(dataclasses.replace(back.config, name="zoo"), zoo.config)
    if kind == conversion.SAFETENSORS:
      self.assertEqual(
        sha256((self.output / hf.WEIGHTS).read_bytes()),
        TRAINED["target"]["file_sha256"],
      )

  def test_wide_weights_are_rounded_on_request_alone(self):
    zoo = load_checkpoint("zoo")
    wide = {n: a.astype(np.float32) for n, a in zoo.params.items()}
    wide["embed.weight"] = wide["embed.weight"] + np.float32(1e-6)
    folder = self.output.parent / "wide"
    hf.save(folder, zoo.config, wide)
    with self.assertRaisesRegex(SpecPilotError, "--round_to_bf16"):
      conversion.convert(str(folder), str(self.output), "bf16")
    self.assertFalse(self.output.exists())
    done = conversion.convert(
      str(folder), str(self.output), "bf16", round_to_bf16=True, verify=True
    )
    self.assertRegex(
      done.notes[-1], r"rounded to bfloat16 \([1-9]\d* of \d+ changed\)"
    )

  def test_taken_output(self):
    self.output.mkdir()
    (self.output / "file").touch()
    with self.assertRaisesRegex(SpecPilotError, "not an empty folder"):
      conversion.convert("zoo", str(self.output), "bf16")


class EvaluateTest(absltest.TestCase):
  def test_acceptance_counts_loops_apart(self):
    from specpilot_jax.decoding.request import RequestMetrics, RequestOutput

    def output(reason, emitted, accepted):
      return RequestOutput(
        prompt_ids=(1,),
        token_ids=(0,) * sum(emitted),
        text=None,
        finish_reason=reason,
        stop_reason=None,
        metrics=RequestMetrics(1, 2, emitted, (3, 3), (3, 3), accepted, 0),
      )

    found = measures.acceptance(
      [output("length", (3, 1), (2, 0)), output("loop", (4, 4), (3, 3))]
    )
    self.assertEqual(found["tau"], 2.0)
    self.assertEqual(found["tau_with_loops"], 3.0)
    self.assertEqual(found["loops"], 1)
    self.assertEqual(found["slot_rates"], [0.5, 0.5, 0.0])

  def test_bits_per_byte(self):
    zoo = loading.load_target("zoo", "float32")
    text = store.prompts()[3]["text"]
    bits = measures.bits_per_byte(zoo.target, zoo.tokenizer, [text])
    packed = measures.compressors([text])
    self.assertLess(bits, packed["xz_per_file"])
    self.assertGreater(bits, 0.1)


if __name__ == "__main__":
  absltest.main()

"""The stages of the zoo's training; `zoo.train` runs them.

A stage that is complete is not run again. One that reaches the deadline saves
its state; the same call goes on from there.
"""

import dataclasses
import gzip
import json
import pathlib
import shutil
import time
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers, trainers

from specpilot_jax.checkpoints import drafter as drafter_io
from specpilot_jax.models import target as target_lib
from specpilot_jax.models.drafters.dflash import DFlash
from specpilot_jax.zoo import (
  data,
  drafter_training,
  optimizer,
  recipes,
  self_text,
  store,
  training,
)

STAGES = ("data", "target", "text", "drafter", "release")

SEQUENCE, PROMPT = 512, 64
TARGET_SCHEDULE = recipes.Schedule(
  phases=(
    recipes.Phase(steps=2145, length=2048, sequences=32),
    recipes.Phase(steps=61, length=8192, sequences=8),
  ),
  peak=3e-3,
  warmup=122,
)
DRAFTER_SCHEDULE = recipes.Schedule(
  phases=(recipes.Phase(steps=12_000, length=SEQUENCE, sequences=48),),
  peak=2e-3,
  warmup=400,
  weight_decay=0.01,
)
ANCHORS, GAMMA = 32, 7.0
TEXT_ROUNDS, TEXT_ROWS = 24, 2048
TOKENIZER_BYTES = 60_000_000
TARGET_FILE = "target.safetensors"


def _scaled(schedule: recipes.Schedule, scale: float) -> recipes.Schedule:
  if scale == 1.0:
    return schedule
  phases = tuple(
    dataclasses.replace(p, steps=max(1, int(p.steps * scale)))
    for p in schedule.phases
  )
  return dataclasses.replace(
    schedule, phases=phases, warmup=int(schedule.warmup * scale)
  )


def train_tokenizer(texts) -> tokenizers.Tokenizer:
  """Byte-level BPE of `recipes.VOCABULARY` ids, special tokens first."""
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  backend.decoder = decoders.ByteLevel()
  backend.train_from_iterator(
    texts,
    trainers.BpeTrainer(
      vocab_size=recipes.VOCABULARY,
      special_tokens=list(recipes.SPECIAL_TOKENS),
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    ),
  )
  return backend


def _stage_data(work: pathlib.Path, test_files: Sequence[str]) -> None:
  documents = data.corpus()
  tests = [_test_strings(pathlib.Path(p)) for p in test_files]
  documents, dropped = data.without_overlap(
    documents, [t for texts in tests for t in texts]
  )
  held_out = [d for d in documents if data.is_held_out(d)]
  train = [d for d in documents if not data.is_held_out(d)]
  order = np.random.default_rng(0).permutation(len(train))
  sample, size = [], 0
  for i in order:
    sample.append(train[i].text)
    size += len(sample[-1])
    if size > TOKENIZER_BYTES:
      break
  backend = train_tokenizer(sample)
  backend.save(str(work / "tokenizer.json"))
  stream = data.token_stream(train, backend, recipes.END_ID, seed=1)
  np.save(work / "train.npy", stream)
  with (work / "held_out.jsonl").open("w") as f:
    for d in held_out:
      f.write(json.dumps({"source": d.source, "text": d.text}) + "\n")
  manifest = data.manifest(train, held_out, dropped) | {
    "train_tokens": stream.size
  }
  (work / "corpus.json").write_text(json.dumps(manifest, indent=1) + "\n")
  shown = {k: v for k, v in manifest.items() if not isinstance(v, dict)}
  print(json.dumps(shown), flush=True)


def _test_strings(path: pathlib.Path) -> list[str]:
  """All strings of a .jsonl or .jsonl.gz file, or a text file as it is."""
  raw = path.read_bytes()
  if path.suffix == ".gz":
    raw = gzip.decompress(raw)
  text = raw.decode()
  if ".jsonl" not in path.name:
    return [text]
  strings: list[str] = []

  def walk(value):
    if isinstance(value, str):
      strings.append(value)
    elif isinstance(value, dict):
      for v in value.values():
        walk(v)
    elif isinstance(value, list):
      for v in value:
        walk(v)

  for line in text.splitlines():
    walk(json.loads(line))
  return strings


def _window(stream: np.ndarray, length: int, count: int, seed) -> np.ndarray:
  """`count` random windows of `length` tokens, int32."""
  rng = np.random.default_rng(seed)
  starts = rng.integers(0, stream.size - length, count)
  return np.stack([stream[s : s + length] for s in starts]).astype(np.int32)


def _target(params, dtype="bfloat16"):
  return target_lib.build(recipes.TARGET, params, dtype)


def _stage_target(work: pathlib.Path, scale: float, deadline) -> bool:
  stream = np.load(work / "train.npy", mmap_mode="r")
  schedule = _scaled(TARGET_SCHEDULE, scale)
  params = target_lib.random_params(recipes.TARGET, seed=0, scale=1.0)
  params["embed.weight"] *= 0.02
  master = target_lib.build(recipes.TARGET, params, "float32")
  graphdef, state = nnx.split(master)

  def batch_at(step):
    phase = schedule.phase_at(step)
    return _window(stream, phase.length + 1, phase.sequences, [2, step])

  model = nnx.eval_shape(
    lambda: target_lib.Target(recipes.TARGET, jnp.bfloat16, nnx.Rngs(0))
  )
  compute_def, _ = nnx.split(model)

  def loss(state, tokens):
    model = nnx.merge(compute_def, training.cast(state, jnp.bfloat16))
    return training.next_token_loss(model, tokens)

  state, done = optimizer.train(
    state, loss, batch_at, schedule, work / "target", deadline=deadline
  )
  if done:
    final = nnx.merge(graphdef, state)
    arrays = {k: np.asarray(v) for k, v in target_lib.parameters(final).items()}
    safetensors.numpy.save_file(arrays, work / TARGET_FILE)
  return done


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
  with np.load(path) as f:
    return {name: f[name] for name in f.files}


def _stage_text(work: pathlib.Path, scale: float, deadline) -> bool:
  stream = np.load(work / "train.npy", mmap_mode="r")
  target = _target(safetensors.numpy.load_file(work / TARGET_FILE))
  temperatures = np.where(np.arange(TEXT_ROWS) % 5 < 3, 0.0, 1.0)
  rounds = max(1, int(TEXT_ROUNDS * scale))
  config = recipes.DFLASH
  (work / "text").mkdir(exist_ok=True)
  for i in range(rounds):
    path = work / "text" / f"{i:03}.npz"
    if path.exists():
      continue
    if deadline is not None and time.monotonic() > deadline:
      return False
    prompts = _window(stream, PROMPT, TEXT_ROWS, [3, i])
    began = time.monotonic()
    rows = self_text.generate(
      target, prompts, SEQUENCE - PROMPT, temperatures, seed=i
    )
    ends = self_text.loop_starts(rows)
    kept = ends >= PROMPT + config.block_size
    np.savez(path, tokens=rows[kept].astype(np.uint16), ends=ends[kept])
    print(
      json.dumps(
        {
          "round": i,
          "kept": int(kept.sum()),
          "loops": int((ends < SEQUENCE).sum()),
          "tokens": int((ends - PROMPT)[kept].sum()),
          "s": round(time.monotonic() - began, 1),
        }
      ),
      flush=True,
    )
  return True


def _stage_drafter(work: pathlib.Path, scale: float, deadline) -> bool:
  text = [_read(p) for p in sorted((work / "text").glob("*.npz"))]
  rows = np.concatenate([t["tokens"] for t in text])
  ends = np.concatenate([t["ends"] for t in text])
  target_def, target_state = nnx.split(
    _target(safetensors.numpy.load_file(work / TARGET_FILE))
  )
  config = recipes.DFLASH
  graphdef, state = nnx.split(DFlash(config, jnp.float32, nnx.Rngs(4)))
  compute_def, _ = nnx.split(
    nnx.eval_shape(lambda: DFlash(config, jnp.bfloat16, nnx.Rngs(0)))
  )
  schedule = _scaled(DRAFTER_SCHEDULE, scale)

  def batch_at(step):
    rng = np.random.default_rng([5, step])
    chosen = rng.integers(0, len(rows), schedule.phases[0].sequences)
    behind = ends[chosen] - config.block_size + 1
    shape = (chosen.size, ANCHORS)
    anchors = rng.integers(PROMPT // 2, behind[:, None], shape)
    return rows[chosen].astype(np.int32), anchors.astype(np.int32), target_state

  def loss(state, batch):
    tokens, anchors, frozen = batch
    drafter = nnx.merge(compute_def, training.cast(state, jnp.bfloat16))
    target = nnx.merge(target_def, frozen)
    return drafter_training.loss(drafter, target, tokens, anchors, GAMMA)[0]

  state, done = optimizer.train(
    state, loss, batch_at, schedule, work / "drafter", deadline=deadline
  )
  if done:
    shutil.rmtree(work / "dflash", ignore_errors=True)
    drafter_io.save(work / "dflash", nnx.merge(graphdef, state))
  return done


def _stage_release(work: pathlib.Path) -> None:
  release = work / "release"
  shutil.rmtree(release, ignore_errors=True)
  store.write_target(
    release / store.TARGET.name,
    safetensors.numpy.load_file(work / TARGET_FILE),
    (work / "tokenizer.json").read_bytes(),
  )
  drafter = drafter_io.load(work / "dflash", "bfloat16")
  drafter_io.save(release / store.DFLASH.name, drafter)
  sources = json.loads((work / "corpus.json").read_text())["sources"]
  lines = (work / "held_out.jsonl").read_text().splitlines()
  store.write_prompts(
    release / store.PROMPTS.name,
    [json.loads(line) for line in lines],
    {name: entry["licence"] for name, entry in sources.items()},
    tokenizers.Tokenizer.from_file(str(work / "tokenizer.json")),
  )


def run(
  wanted: Sequence[str],
  work: pathlib.Path,
  *,
  scale: float = 1.0,
  test_files: Sequence[str] = (),
  deadline: float | None = None,
) -> str | None:
  """Runs stages in their order.

  Args:
    wanted: names of `STAGES`.
    work: keeps everything.
    scale: multiplies all step counts.
    test_files: text that the corpus must not overlap with (.jsonl, .jsonl.gz
      or plain).
    deadline: `time.monotonic()` value after which a stage saves and stops.

  Returns:
    The stage that the deadline interrupted, or None.
  """
  work.mkdir(parents=True, exist_ok=True)
  if "data" in wanted and not (work / "corpus.json").exists():
    _stage_data(work, test_files)
  if "target" in wanted and not (work / TARGET_FILE).exists():
    if not _stage_target(work, scale, deadline):
      return "target"
  if "text" in wanted and not _stage_text(work, scale, deadline):
    return "text"
  if "drafter" in wanted and not (work / "dflash").exists():
    if not _stage_drafter(work, scale, deadline):
      return "drafter"
  if "release" in wanted:
    _stage_release(work)
  return None

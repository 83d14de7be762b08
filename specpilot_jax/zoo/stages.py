"""The stages of the zoo's training; `zoo.train` runs them.

A stage that is complete is not run again. One that reaches the deadline saves
its state; the same call goes on from there.
"""

import json
import pathlib
import shutil
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers, trainers

from specpilot_jax import loading
from specpilot_jax.checkpoints import ZOO
from specpilot_jax.checkpoints import drafter as drafter_io
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import target as target_lib
from specpilot_jax.zoo import (
  data,
  drafter_stages,
  optimizer,
  prompting,
  recipes,
  store,
  training,
)

STAGES = ("data", "target", "text", "drafter", "release")
TOKENIZER_BYTES = 60_000_000
TARGET_FILE = "target.safetensors"


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


def _write_corpus(
  name: str, work: pathlib.Path, train, held_out, dropped, **more
) -> None:
  manifest = (
    {"recipe": _family(name)} | data.manifest(train, held_out, dropped) | more
  )
  (work / "corpus.json").write_text(json.dumps(manifest, indent=1) + "\n")
  shown = {k: v for k, v in manifest.items() if not isinstance(v, dict)}
  print(json.dumps(shown), flush=True)


def _family(name: str) -> str:
  """What `work` belongs to: drafters of a target that ships share the text."""
  target = recipes.DRAFTERS[name].target
  return name if name == target else f"{target} drafters"


def _stage_data(name: str, work: pathlib.Path, tests: Sequence[str]) -> None:
  documents, dropped = data.without_overlap(data.corpus(), tests)
  held_out = [d for d in documents if data.is_held_out(d)]
  train = [d for d in documents if not data.is_held_out(d)]
  if recipes.DRAFTERS[name].target != ZOO:
    heads = prompting.function_heads(d.text for d in train)
    (work / "heads.json").write_text(json.dumps(heads))
    _write_corpus(
      name, work, train, held_out, dropped, function_heads=len(heads)
    )
    return
  kept = work / "tokenizer.json"
  if name != ZOO:
    shutil.copyfile(store.TARGET / "tokenizer.json", kept)
  if kept.exists():  # of an earlier run: ids keep their meaning
    backend = tokenizers.Tokenizer.from_file(str(kept))
  else:
    order = np.random.default_rng(0).permutation(len(train))
    sample, size = [], 0
    for i in order:
      sample.append(train[i].text)
      size += len(sample[-1])
      if size > TOKENIZER_BYTES:
        break
    backend = train_tokenizer(sample)
    backend.save(str(kept))
  stream = data.token_stream(train, backend, recipes.END_ID, seed=1)
  np.save(work / "train.npy", stream)
  with (work / "held_out.jsonl").open("w") as f:
    for d in held_out:
      f.write(json.dumps({"source": d.source, "text": d.text}) + "\n")
  _write_corpus(name, work, train, held_out, dropped, train_tokens=stream.size)


def _stage_target(work: pathlib.Path, scale: float, deadline) -> bool:
  stream = np.load(work / "train.npy", mmap_mode="r")
  schedule = recipes.TARGET_SCHEDULE.scaled(scale)
  params = target_lib.random_params(recipes.TARGET, seed=0, scale=1.0)
  params["embed.weight"] *= 0.02
  master = target_lib.build(recipes.TARGET, params, "float32")
  graphdef, state = nnx.split(master)

  def batch_at(step):
    phase = schedule.phase_at(step)
    return prompting.windows(
      stream, phase.length + 1, phase.sequences, [2, step]
    )

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
    # A name that is there means a stage that is complete.
    part = work / f"{TARGET_FILE}.part"
    safetensors.numpy.save_file(arrays, part)
    part.rename(work / TARGET_FILE)
  return done


def _trained_params(work: pathlib.Path) -> dict[str, np.ndarray]:
  path = work / TARGET_FILE
  if not path.is_file():
    raise SpecPilotError(f"{path} is missing; run the target stage first")
  try:
    return safetensors.numpy.load_file(path)
  except safetensors.SafetensorError:
    raise SpecPilotError(
      f"{path}: damaged; delete it, and the target stage writes it again"
    ) from None


def _loaded(name: str, work: pathlib.Path) -> loading.LoadedModel:
  """The target whose drafter is trained: of this run, or as it ships."""
  if name != ZOO:
    return loading.load_target(recipes.DRAFTERS[name].target, "bfloat16")
  return loading.LoadedModel(
    target=target_lib.build(recipes.TARGET, _trained_params(work), "bfloat16"),
    tokenizer=None,
    notes=(),
    sha256={},
  )


def _prompts(
  name: str,
  recipe: recipes.DrafterRecipe,
  model: loading.LoadedModel,
  work: pathlib.Path,
  tests: Sequence[str],
) -> Callable[[int], Sequence[Sequence[int]]]:
  """Training prompts of each round."""
  if recipe.target == ZOO:
    stream = np.load(work / "train.npy", mmap_mode="r")
    return lambda i: prompting.windows(
      stream, recipe.prompt_tokens, recipe.rows, [3, i]
    ).tolist()
  tokenizer = model.tokenizer
  if tokenizer is None:
    raise SpecPilotError(f"{name} has no tokenizer")
  heads = json.loads((work / "heads.json").read_text())
  forbidden = data.runs_of(tests)

  def allowed(text):
    return forbidden.isdisjoint(data.ngrams(text))

  def of_round(i):
    target, rows = model.target, recipe.rows
    return prompting.answers_wanted(
      heads,
      prompting.own_heads(target, tokenizer, rows, 2 * i, allowed),
      prompting.questions(target, tokenizer, rows, i, allowed),
      tokenizer,
      rows,
      recipe.prompt_tokens,
      [3, i],
    )

  return of_round


def _stage_release(name: str, work: pathlib.Path) -> None:
  recipe = recipes.DRAFTERS[name]
  kind = recipe.config.kind
  drafter = drafter_io.load(work / kind, "bfloat16")
  params = _trained_params(work) if name == ZOO else {}
  release = work / "release"
  shipped = release / store.DRAFTERS[recipe.target][kind].name
  shutil.rmtree(release if name == ZOO else shipped, ignore_errors=True)
  drafter_io.save(shipped, drafter, encode=True)
  if name != ZOO:
    return
  store.write_target(
    release / store.TARGET.name,
    params,
    (work / "tokenizer.json").read_bytes(),
  )
  sources = json.loads((work / "corpus.json").read_text())["sources"]
  lines = (work / "held_out.jsonl").read_text().splitlines()
  store.write_prompts(
    release / store.PROMPTS.name,
    [json.loads(line) for line in lines],
    {name: entry["licence"] for name, entry in sources.items()},
    tokenizers.Tokenizer.from_file(str(work / "tokenizer.json")),
  )


def run(
  name: str,
  wanted: Sequence[str],
  work: pathlib.Path,
  *,
  scale: float = 1.0,
  test_files: Sequence[str] = (),
  deadline: float | None = None,
) -> str | None:
  """Runs stages in their order.

  Args:
    name: of `recipes.DRAFTERS`; only `zoo` trains its target here.
    wanted: names of `STAGES`.
    work: keeps everything.
    scale: multiplies all step counts.
    test_files: text that the corpus must not overlap with (.jsonl, .jsonl.gz
      or plain).
    deadline: `time.monotonic()` value after which a stage saves and stops.

  Returns:
    The stage that the deadline interrupted, or None.

  Raises:
    SpecPilotError: `work` is of another recipe, or a stage lacks what an
      earlier one writes.
  """
  work.mkdir(parents=True, exist_ok=True)
  manifest = work / "corpus.json"
  if manifest.exists():
    own = _family(name)
    of = json.loads(manifest.read_text()).get("recipe", own)
    if of != own:
      raise SpecPilotError(f"{work} holds a run of the recipe {of}, not {own}")
  recipe = drafter_stages.scaled(recipes.DRAFTERS[name], scale)
  tests = [s for p in test_files for s in data.test_strings(pathlib.Path(p))]
  if "data" in wanted and not manifest.exists():
    _stage_data(name, work, tests)
  if "target" in wanted and name == ZOO and not (work / TARGET_FILE).exists():
    if not _stage_target(work, scale, deadline):
      return "target"
  if {"text", "drafter"} & set(wanted):
    model = _loaded(name, work)
    if "text" in wanted and not drafter_stages.write_text(
      recipe,
      model.target,
      _prompts(name, recipe, model, work, tests),
      work / "text",
      # The zoo's rows go on into the next document, as its training text does.
      () if recipe.target == ZOO else model.config.eos_token_ids,
      deadline,
    ):
      return "text"
    if "drafter" in wanted and not (work / recipe.config.kind).exists():
      if not drafter_stages.train(recipe, model.target, work, deadline):
        return "drafter"
  if "release" in wanted:
    _stage_release(name, work)
  return None

"""The single-request engine: one compiled executable per step."""

import contextlib
import dataclasses
import functools
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import tree_hopper
from specpilot_jax import compilation
from specpilot_jax import kernels as kernels_lib
from specpilot_jax.configs import GDN, ONE_LEVEL, SystemConfig, runs_on
from specpilot_jax.decoding import sampling as sampling_lib
from specpilot_jax.decoding import step as step_lib
from specpilot_jax.decoding.draft import Drafter
from specpilot_jax.decoding.policy import Policy
from specpilot_jax.decoding.request import (
  RequestOutput,
  StreamChunk,
  TokenScores,
)
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.decoding.schedule import Schedule
from specpilot_jax.decoding.transcript import StepResult, Transcript
from specpilot_jax.errors import SpecPilotError
from specpilot_jax.models import layers
from specpilot_jax.models import state as state_lib
from specpilot_jax.models.target import Target
from specpilot_jax.tokenizer import Tokenizer

CUT_TOLERANCE = 0.5
"""Default width of filter cut-offs in scoring, in logits (DESIGN section 7)."""


@dataclasses.dataclass(frozen=True)
class _Compiled:
  """Jitted functions of one feature set."""

  reset: Any
  prefill: Any
  judged: Any  # the same by definition, for what is scored behind it
  step: Any
  score: Any

  @classmethod
  def of(cls, fns: step_lib.StepFns) -> "_Compiled":
    prefill = judged = jax.jit(fns.prefill, donate_argnums=1)
    if fns.kernels.in_runs:
      own = functools.partial(fns.prefill, definition=True)
      judged = jax.jit(own, donate_argnums=1)
    return cls(
      reset=jax.jit(fns.reset, donate_argnums=0),
      prefill=prefill,
      judged=judged,
      step=jax.jit(fns.step, donate_argnums=1),
      score=jax.jit(fns.score, donate_argnums=1),
    )


class Engine:
  """Decodes one request at a time.

  Without a drafter this is autoregressive decoding: the same engine with an
  executable of one node.

  A model with random weights emits the same tokens with drafts and without:

  >>> import dataclasses
  >>> from specpilot_jax import configs
  >>> from specpilot_jax.decoding.prompt_lookup import PromptLookup
  >>> from specpilot_jax.models import target as target_lib
  >>> config = dataclasses.replace(
  ...   configs.preset("SmolLM2-135M"),
  ...   vocab_size=16,
  ...   hidden_size=32,
  ...   intermediate_size=48,
  ...   layer_types=(configs.ATTENTION,),
  ...   context_length=64,
  ... )
  >>> target = target_lib.build(
  ...   config, target_lib.random_params(config, seed=3, scale=3), "float32"
  ... )
  >>> request = SamplingParams(max_tokens=24, ignore_eos=True)
  >>> plain = Engine(target).generate([1, 2, 3, 1, 2, 3], request)
  >>> drafted = Engine(target, drafter=PromptLookup()).generate(
  ...   [1, 2, 3, 1, 2, 3], request
  ... )
  >>> drafted.token_ids == plain.token_ids, len(plain.token_ids)
  (True, 24)
  >>> plain.metrics.acceptance_length
  1.0
  >>> drafted.metrics.acceptance_length >= 1
  True

  Args:
    target: a built target.
    drafter: see `decoding.draft.Drafter`.
    tokenizer: for text in the results, stop strings and streaming.
    system: mechanisms; stock by default.
    schedule: what precedes the exact pass, where the system wants something.
    max_seq_len: prompt plus output tokens at most; the model's context length
      by default. Memory is reserved for it.
    prefill_chunk: prompt tokens per pass.
    host_lag: steps that the host reads behind the device. 1 hides the read on
      an accelerator; a CPU gains nothing from it.

  Raises:
    SpecPilotError: a setting that does not fit the target or the drafter.
  """

  def __init__(
    self,
    target: Target,
    *,
    drafter: Drafter | None = None,
    tokenizer: Tokenizer | None = None,
    system: SystemConfig | None = None,
    schedule: Schedule | None = None,
    max_seq_len: int | None = None,
    prefill_chunk: int = 64,
    host_lag: int | None = None,
  ):
    system = SystemConfig() if system is None else system
    config = target.config
    self.config = config
    self.dtype = target.dtype
    self.drafter = drafter
    self.tokenizer = tokenizer
    self.system = system
    if max_seq_len is None:
      max_seq_len = config.context_length
    self.max_seq_len = max_seq_len
    self.prefill_chunk = prefill_chunk
    self._check(config, drafter, tokenizer)
    if not runs_on(system.weights, target.weights):
      raise SpecPilotError(
        f"the system wants weights={system.weights}, {config.name} is in"
        f" {target.weights}"
      )
    # No prompt is longer, and a pass costs the memory of its whole chunk.
    self.prefill_chunk = prefill_chunk = min(prefill_chunk, max_seq_len)
    self.policy = policy = Policy.of(system, drafter)
    self._limits = policy.limits()
    if (schedule is None) != (system.verification == ONE_LEVEL):
      raise SpecPilotError(
        f"verification={system.verification} is to run"
        f" {'with' if schedule is None else 'without'} a schedule of passes"
      )
    if schedule is not None and schedule.system != system:
      raise SpecPilotError(
        "the schedule of passes was made for another system:"
        f" {schedule.system}, not {system}"
      )
    self.schedule = schedule
    # By what requests are compiled for: an executable has times of its own.
    self._plans: dict[sampling_lib.Features, Any] = {}
    self._told: Any = None  # a plan for all of them
    widest = policy if schedule is None else schedule
    kernels_lib.check_passes(
      target.kernels,
      widest.rows,
      prefill_chunk,
      target.weights,
      path=widest.path,
      dtype=str(target.dtype),
      recurrent=GDN in config.layer_types,
    )
    if host_lag is None:
      host_lag = 0 if jax.default_backend() == "cpu" else 1
    self.host_lag = host_lag

    graphdef, params = nnx.split(target)
    self._params = step_lib.Params.of(
      params,
      drafter.params if drafter else (),
      schedule.params if schedule else (),
    )
    self._fns_by_features: dict[sampling_lib.Features, _Compiled] = {}
    self._base = step_lib.StepFns(
      config=config,
      graphdef=graphdef,
      drafter=drafter,
      policy=policy,
      kernels=target.kernels,
      acceptance=system.acceptance,
      features=sampling_lib.Features(True, False, False),
      schedule=schedule,
    )
    # A commit writes all rows of a path, those it does not keep as zeros.
    capacity = self.max_seq_len + max(prefill_chunk, widest.path)
    if target.kernels.tree_attention == "mosaic":
      capacity += -capacity % tree_hopper.EIGHT
    self._capacity = capacity
    self._acc = layers.accumulation_dtype(target.dtype)
    # The carry of the last request, taken up by the next. None while a request
    # runs, and after one that broke off inside a donated call.
    self._carry: step_lib.Carry | None = None
    self._busy = False

  def fresh_carry(self) -> step_lib.Carry:
    """An empty carry; room for penalties comes with the request."""
    drafter = self.drafter
    return step_lib.Carry(
      target=state_lib.init_state(self.config, self._capacity, self.dtype),
      drafter=drafter.init_context(self._capacity) if drafter else None,
      anchor=jnp.zeros((), jnp.int32),
      remaining=jnp.zeros((), jnp.int32),
      history=None,
      done=jnp.zeros((), bool),
      schedule=self.schedule.fresh() if self.schedule else (),
    )

  def _check(self, config, drafter, tokenizer) -> None:
    for name in ("max_seq_len", "prefill_chunk"):
      value = getattr(self, name)
      if not isinstance(value, int) or isinstance(value, bool):
        raise SpecPilotError(f"{name} must be an integer, got {value!r}")
    if not 2 <= self.max_seq_len <= config.context_length:
      raise SpecPilotError(
        f"max_seq_len {self.max_seq_len} is not between 2 and the context"
        f" length {config.context_length} of {config.name}"
      )
    if self.prefill_chunk < 1:
      raise SpecPilotError(
        f"prefill_chunk must be at least 1, got {self.prefill_chunk}"
      )
    if tokenizer is not None and tokenizer.size > config.vocab_size:
      raise SpecPilotError(
        f"tokenizer has {tokenizer.size} ids, {config.name} only"
        f" {config.vocab_size}"
      )
    if drafter is None:
      for name in (
        "acceptance", "num_drafts", "tree", "node_budget", "tree_depth",
        "verification", "drafter_view",
      ):  # fmt: skip
        if getattr(self.system, name) != getattr(SystemConfig(), name):
          raise SpecPilotError(
            f"{name}={getattr(self.system, name)} needs a drafter: without one"
            " decoding is autoregressive"
          )
      return
    sizes = (config.vocab_size, config.valid_vocab)
    if drafter.vocab_size is not None and drafter.vocab_size not in sizes:
      raise SpecPilotError(
        f"drafter {drafter.name} has a vocabulary of {drafter.vocab_size} ids,"
        f" target {config.name} of {config.valid_vocab}"
        f" (padded to {config.vocab_size})"
      )
    for tap in drafter.taps:
      if not 0 <= tap < config.num_layers:
        raise SpecPilotError(
          f"drafter {drafter.name} taps layer {tap}, target {config.name} has"
          f" {config.num_layers} layers"
        )

  @property
  def params(self) -> step_lib.Params:
    """Of the target and the drafter, as every call takes them."""
    return self._params

  @property
  def fns(self) -> step_lib.StepFns:
    """The pure functions, with features for greedy decoding."""
    return self._base

  @property
  def capacity(self) -> int:
    """Rows of keys and values, those that a commit may write behind the last
    token among them."""
    return self._capacity

  @property
  def num_drafts(self) -> int:
    """Drafts that an exact pass has room for."""
    return (self.schedule or self.policy).rows - 1

  def set_limits(
    self, *, nodes: int | None = None, depth: int | None = None
  ) -> None:
    """Limits what later requests verify; nothing is compiled again.

    Args:
      nodes: of a pass at most, the anchor included; None for the system's own.
      depth: drafts of a path at most; None for the system's own.

    Raises:
      SpecPilotError: more than the compiled passes have room for.
    """
    self._limits = self.policy.limits(nodes, depth)

  @property
  def num_compilations(self) -> int:
    """See `compilation.num_compilations`."""
    return compilation.num_compilations()

  def _compiled(self, features: sampling_lib.Features) -> _Compiled:
    if features not in self._fns_by_features:
      fns = dataclasses.replace(self._base, features=features)
      compiled = _Compiled.of(fns)
      for other in self._fns_by_features.values():
        # A prefill has no sampling in it: one serves all requests.
        compiled = dataclasses.replace(compiled, prefill=other.prefill)
      self._fns_by_features[features] = compiled
    return self._fns_by_features[features]

  def check_ids(self, ids: Sequence[int], what: str) -> np.ndarray:
    """Token ids as int32; raises where one is out of range."""
    try:
      array = np.asarray(ids)
    except ValueError:  # Rows of different length.
      raise SpecPilotError(
        f"{what} must be a sequence of integers, got a ragged one"
      ) from None
    if array.size == 0:
      raise SpecPilotError(f"{what} is empty")
    if array.dtype == object:
      raise SpecPilotError(f"{what} holds values that are no token ids")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
      raise SpecPilotError(
        f"{what} must be a sequence of integers, got {array.dtype} of shape"
        f" {array.shape}"
      )
    bad = (array < 0) | (array >= self.config.valid_vocab)
    if bad.any():
      at = int(np.argmax(bad))
      raise SpecPilotError(
        f"{what}: token id {int(array[at])} at index {at} is outside the"
        f" vocabulary of {self.config.valid_vocab}"
      )
    return array.astype(np.int32)

  def _start(
    self, compiled: _Compiled, prompt: np.ndarray, limit: int, read: Any = None
  ) -> step_lib.Carry:
    """Resets the one carry and prefills all of the prompt but its last id."""
    read = read or compiled.prefill
    carry, self._carry = self._carry, None
    if carry is None:
      carry = self.fresh_carry()
    padded = np.zeros(self._capacity, np.int32)
    padded[: prompt.size] = prompt
    carry = compiled.reset(
      dataclasses.replace(carry, history=None),
      padded,
      np.int32(prompt.size),
      np.int32(limit),
    )
    chunk = self.prefill_chunk
    for start in range(0, prompt.size - 1, chunk):
      count = min(chunk, prompt.size - 1 - start)
      tokens = np.zeros(chunk, np.int32)
      tokens[:count] = prompt[start : start + count]
      carry = read(self._params, carry, tokens, np.int32(count))
    return carry

  def request(self, sampling: SamplingParams) -> step_lib.Request:
    """A request's settings as arrays; raises where they cannot be met."""
    self.system.check_temperature(sampling.temperature)
    for token in sampling.stop_token_ids:
      if token >= self.config.vocab_size:
        raise SpecPilotError(
          f"stop token id {token} is outside the vocabulary of"
          f" {self.config.vocab_size}"
        )
    ids = sampling.stop_ids(self.config.eos_token_ids)
    padded = np.full(sampling_lib.MAX_STOP_IDS, -1, np.int32)
    padded[: len(ids)] = ids
    return step_lib.Request(
      sampling=sampling_lib.Sampling.of(sampling, self._acc),
      stop_ids=jnp.asarray(padded),
      limits=self._limits,
      plan=self._known_plan(sampling),
    )

  def set_plan(self, plan: Any) -> None:
    """What the schedule weighs from now on, see `schedule.Schedule.plan`; None
    for its own. Nothing is compiled again."""
    self._told = plan

  def plan(self, sampling: SamplingParams) -> Any:
    """What the schedule weighs for such requests; empty without a schedule.

    Between requests: it may have to time steps first.
    """
    features = sampling_lib.Features.of(sampling)
    known = self._told is not None or features in self._plans
    if self.schedule is not None and not known:
      self._plans[features] = self.schedule.plan(self, sampling)
    return self._known_plan(sampling)

  def _known_plan(self, sampling: SamplingParams) -> Any:
    if self._told is not None:
      return self._told
    return self._plans.get(sampling_lib.Features.of(sampling), ())

  def steps(
    self, prompt_ids: Sequence[int], sampling: SamplingParams
  ) -> Generator[tuple[step_lib.Carry, StepResult]]:
    """Runs a request step by step, until the device ends it.

    Yields the carry after each step and what the step emitted. With a host lag
    the carry is that many steps further on. A carry is valid until the next
    step; closing the iterator makes the engine ready for the next request.
    """
    self.system.check_alone()
    prompt = self.check_ids(prompt_ids, "prompt")
    room = self.max_seq_len - prompt.size
    if room < 1:
      raise SpecPilotError(
        f"prompt of {prompt.size} tokens leaves no room for output in a context"
        f" of {self.max_seq_len}"
      )
    limit = min(sampling.max_tokens, room)
    self.plan(sampling)
    compiled = self._compiled(sampling_lib.Features.of(sampling))
    request = self.request(sampling)
    with self._one_request():
      carry = self._start(compiled, prompt, limit)
      pending: deque[step_lib.StepOutput] = deque()
      while True:
        carry, out = compiled.step(self._params, carry, request)
        pending.append(out)
        if len(pending) <= self.host_lag:
          continue
        out = jax.device_get(pending.popleft())
        if not out.healthy:
          raise SpecPilotError(
            f"{self.config.name}: logits turned NaN in {self.dtype}"
          )
        result = StepResult.of(out)
        try:
          yield carry, result
        except GeneratorExit:
          self._carry = carry
          raise
        if out.stopped or out.exhausted:
          self._carry = carry
          return

  @contextlib.contextmanager
  def _one_request(self) -> Generator[None]:
    """Refuses a second request while one runs.

    Whoever ends in good order hands its carry on in `_carry`. After an
    exception, a Ctrl-C among them, the carry may have been donated to a call
    that never returned, or hold NaN: the next request makes a fresh one.
    """
    if self._busy:
      raise SpecPilotError("the engine decodes one request at a time")
    self._busy = True
    try:
      yield
    finally:
      self._busy = False

  def stream(
    self, prompt_ids: Sequence[int], sampling: SamplingParams
  ) -> Generator[StreamChunk, None, None]:
    """Decodes a request; yields chunks as they appear, the last with `output`.

    Raises:
      SpecPilotError: empty prompt, id out of range, prompt too long for the
        context, stop strings without a tokenizer.
    """
    if sampling.stop and self.tokenizer is None:
      raise SpecPilotError("stop strings need a tokenizer")
    transcript = Transcript(
      prompt_ids, sampling, self.tokenizer, time.perf_counter()
    )
    steps = self.steps(prompt_ids, sampling)
    try:
      for _, result in steps:
        chunk = transcript.push(result, time.perf_counter())
        if chunk.output is not None:
          break
        yield chunk
      else:
        raise AssertionError("the device ends a request where its host does")
    finally:
      steps.close()
    yield chunk

  def generate(
    self, prompt_ids: Sequence[int], sampling: SamplingParams | None = None
  ) -> RequestOutput:
    """Decodes a request; see `stream`."""
    for chunk in self.stream(prompt_ids, sampling or SamplingParams()):
      if chunk.output is not None:
        return chunk.output
    raise AssertionError("a stream ends with its output")

  def lowered(self, sampling: SamplingParams) -> jax.stages.Lowered:
    """A step of such requests before compilation."""
    compiled = self._compiled(sampling_lib.Features.of(sampling))
    fresh = jax.eval_shape(self.fresh_carry)
    carry = jax.eval_shape(
      compiled.reset,
      dataclasses.replace(fresh, history=None),
      jax.ShapeDtypeStruct((self._capacity,), np.int32),
      np.int32(1),
      np.int32(1),
    )
    return compiled.step.lower(self._params, carry, self.request(sampling))

  def wait(self) -> None:
    """Returns once the device has done all that past requests left to it.

    With a host lag a request ends for the host while the device still runs the
    steps behind its last: a clock that starts now would count them in.
    """
    jax.block_until_ready(self._carry)

  def warm_up(self, sampling: SamplingParams | None = None) -> None:
    """Compiles all that requests with such settings need, scoring apart."""
    ids = [0] * min(2, self.max_seq_len - 1)
    self.generate(
      ids,
      dataclasses.replace(
        sampling or SamplingParams(), max_tokens=2, stop=(), ignore_eos=True
      ),
    )

  def score(
    self,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    sampling: SamplingParams | None = None,
    *,
    cut_tolerance: float = CUT_TOLERANCE,
  ) -> TokenScores:
    """Teacher-forces an output through the target, in chunks.

    Args:
      prompt_ids: at least one id.
      output_ids: the tokens to score; each is judged after the prompt and the
        output before it.
      sampling: how the output was drawn: its noise, filters and penalties.
      cut_tolerance: how far from the cut-off of a filter a token may stand on
        either side of it, in logits.

    Returns:
      One entry per output token.

    Raises:
      SpecPilotError: as `stream`; also where both together are longer than the
        context.
    """
    sampling = sampling or SamplingParams()
    prompt = self.check_ids(prompt_ids, "prompt")
    output = self.check_ids(output_ids, "output")
    if prompt.size + output.size > self.max_seq_len:
      raise SpecPilotError(
        f"{prompt.size} prompt and {output.size} output tokens do not fit a"
        f" context of {self.max_seq_len}"
      )
    compiled = self._compiled(sampling_lib.Features.of(sampling))
    # A score knows of no schedule: one executable, whatever that weighs.
    request = dataclasses.replace(self.request(sampling), plan=())
    inputs = np.concatenate([prompt[-1:], output[:-1]])
    chunk, results = self.prefill_chunk, []
    tolerance = np.asarray(cut_tolerance, self._acc)
    with self._one_request():
      carry = self._start(compiled, prompt, output.size, compiled.judged)
      for start in range(0, output.size, chunk):
        count = min(chunk, output.size - start)
        tokens, targets = np.zeros((2, chunk), np.int32)
        tokens[:count] = inputs[start : start + count]
        targets[:count] = output[start : start + count]
        carry, result = compiled.score(
          self._params,
          carry,
          request,
          tokens,
          targets,
          np.int32(count),
          tolerance,
        )
        results.append((result, count))
      self._carry = carry
    results = [
      jax.tree.map(lambda x, c=count: x[:c], jax.device_get(result))
      for result, count in results
    ]
    scores = TokenScores(
      logprobs=np.concatenate([r.logprob for r in results]).astype(np.float64),
      argmax=np.concatenate([r.argmax for r in results]),
      gaps=np.concatenate([r.gap for r in results]).astype(np.float64),
    )
    if np.isnan(scores.logprobs).any():
      raise SpecPilotError(f"{self.config.name}: logits turned NaN in scoring")
    return scores

"""The process that holds an engine and serves the controller over pipes.

    python -m experiments.controller.worker COMMANDS REPLIES

with two open file descriptors. Commands come one at a time: `load` once, then
any number of `generate`, then the pipe's end. Whatever this process says of
itself is a diagnostic: the controller keeps its own time and checks the tokens.
"""

import dataclasses
import os
import sys
from typing import Any

from experiments.controller import frames


def machine() -> dict[str, Any]:
  """What the device is, and what runs on it."""
  import jax
  import jaxlib

  device = jax.devices()[0]
  return {
    "platform": device.platform,
    "device_kind": device.device_kind,
    "platform_version": str(device.client.platform_version)[:200],
    "jax": jax.__version__,
    "jaxlib": jaxlib.__version__,
    "python": sys.version.split()[0],
  }


class Server:
  """Answers commands.

  Args:
    replies: file descriptor.
  """

  def __init__(self, replies: int):
    self._replies = replies
    self._engine: Any = None

  def send(self, message: dict[str, Any]) -> None:
    frames.write(self._replies, message)

  def load(self, settings: dict[str, Any]) -> None:
    """Builds the engine, compiles and warms up."""
    from specpilot_jax import compilation, footprint, kernels, loading
    from specpilot_jax.decoding.engine import Engine
    from specpilot_jax.decoding.sampling import SamplingParams
    from specpilot_jax.mechanisms import registry

    loading.prepare_jax(settings["dtype"])
    system = registry.parse_options(settings["options"])
    source = loading.open_target(settings["target"])
    model = source.build(
      settings["dtype"], kernels.parse(settings["kernels"]), system.weights
    )
    drafter = loading.make_drafter(settings["drafter"], model.target)
    target, drafter = registry.prepare(system, model.target, drafter)
    self._engine = Engine(
      target,
      drafter=drafter,
      tokenizer=model.tokenizer,
      system=system,
      schedule=registry.schedule(system, target, drafter),
      max_seq_len=settings["max_seq_len"],
      prefill_chunk=settings["prefill_chunk"],
    )
    sampling = SamplingParams(**_tuples(settings["sampling"]))
    self._engine.warm_up(sampling)
    self._engine.wait()
    self._compilations = compilation.num_compilations
    self.send(
      {
        "kind": "ready",
        "machine": machine(),
        "config": model.config.name,
        "sha256": dict(model.sha256),
        "dtype": str(target.dtype),
        "device_bytes": footprint.device_bytes(),
        "compilations": self._compilations(),
      }
    )

  def generate(self, command: dict[str, Any]) -> None:
    """One request: frames of tokens as they appear, then the end."""
    from specpilot_jax.decoding.sampling import SamplingParams

    sampling = SamplingParams(**_tuples(command["sampling"]))
    request, output = command["id"], None
    for chunk in self._engine.stream(command["prompt_ids"], sampling):
      self.send({"kind": "tokens", "id": request, "ids": list(chunk.token_ids)})
      output = chunk.output
    assert output is not None
    self.send(
      {
        "kind": "end",
        "id": request,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "text": output.text,
        "emitted_per_step": output.metrics.emitted_per_step,
        "drafted_per_step": output.metrics.drafted_per_step,
        "depth_per_step": output.metrics.depth_per_step,
        "accepted_per_step": output.metrics.accepted_per_step,
        "cut_steps": output.metrics.cut_steps,
      }
    )
    # The next request's clock must not run while the steps behind this one's
    # last do.
    self._engine.wait()
    self.send(
      {
        "kind": "idle",
        "id": request,
        "compilations": self._compilations(),
      }
    )


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
  return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


def serve(commands: int, replies: int) -> None:
  """Runs until the controller closes its end."""
  server, decoder = Server(replies), frames.Decoder()
  while True:
    messages = frames.read(commands, decoder)
    if messages is None:
      return
    for message in messages:
      try:
        if message["kind"] == "load":
          server.load(message["settings"])
        else:
          server.generate(message)
      except Exception as e:
        if not dataclasses.is_dataclass(e):  # Its text alone, on one line.
          text = " ".join(str(e).split())[:500]
          server.send({"kind": "error", "error": f"{type(e).__name__}: {text}"})
        raise


if __name__ == "__main__":
  os.umask(0o077)
  serve(int(sys.argv[1]), int(sys.argv[2]))

"""Calibration of the gate by simulation, on the code that decides.

Every repetition draws a deployment's A/A sessions, then a candidate's session,
as times in seconds; they go through the same functions as measured ones. A time
is base x request x (1 + drift) x exp(launch + noise) / gain: launch offsets are
drawn once per process, so they are shared by all requests of a session.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from experiments.controller import statistics

LAUNCH_NOISE = (0.0006, 0.002, 0.005, 0.01)
"""Standard deviations of a launch's log time; 0.06 % was seen on an H200."""
GAINS = (0.0, 0.01, 0.02, 0.03, 0.05)
DESIGNS = ("one device", "two devices")
NOISES = ("normal", "left-skewed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """How times come about.

  Attributes:
    design: of `DESIGNS`.
    noise: of `NOISES`: of a request's log time. The left-skewed one has, in
      the candidate, a few requests that are very slow.
    launch: standard deviation of a process's offset.
    request: standard deviation of a request's noise.
    units: of a session.
    sessions: A/A sessions behind s_AA.
    drift: of the machine over a session, as a share.
  """

  design: str = "one device"
  noise: str = "normal"
  launch: float = 0.002
  request: float = 0.01
  units: int = 32
  sessions: int = statistics.WANTED_SESSIONS
  drift: float = 0.01


def _noise(model: Model, rng, shape, *, candidate: bool) -> np.ndarray:
  if model.noise == "left-skewed" and candidate:
    # Slow requests: log time has a long right tail, r a long left one.
    tail = rng.exponential(1.0, shape) - 1.0
    return model.request * tail
  return rng.normal(0.0, model.request, shape)


def session(model: Model, rng, gain: float, *, against_itself: bool = False):
  """Log-ratios of one session of fresh processes.

  Args:
    gain: true gain of the geometric mean, as a share.
    against_itself: an A/A session: both are stock, and their noise with it.
  """
  shape = (model.units, 2)
  skewed = not against_itself
  base = rng.lognormal(0.0, 0.3, shape)  # The requests differ.
  # Of each process, or of each process on each device.
  per_process = (2,) if model.design == "two devices" else (1,)
  launch_s = rng.normal(0.0, model.launch, per_process)
  launch_c = rng.normal(0.0, model.launch, per_process)
  noise_s = _noise(model, rng, shape, candidate=False)
  noise_c = _noise(model, rng, shape, candidate=skewed)
  if model.design == "two devices":
    # The same request on both devices, which differ by a few per cent.
    base = np.repeat(base[:, :1], 2, axis=1)
    device = np.array([0.0, 0.02])
    phase = np.array([0.0, model.drift])
    stock = base * np.exp(device + phase[::-1] + launch_s + noise_s)
    other = base * np.exp(device + phase + launch_c + noise_c)
    r, _ = statistics.two_device_units(stock, other / (1 + gain))
    return r
  place = np.arange(4 * model.units).reshape(model.units, 4)
  drift = model.drift * place / place.size
  first = np.arange(model.units) % 2 == 0  # S C C S, then C S S C.
  outer, inner = drift[:, [0, 3]], drift[:, [1, 2]]
  drift_s = np.where(first[:, None], outer, inner)
  drift_c = np.where(first[:, None], inner, outer)
  stock = base * np.exp(drift_s + launch_s + noise_s)
  other = base * np.exp(drift_c + launch_c + noise_c)
  return statistics.one_device_units(stock, other / (1 + gain))


def acceptance_rate(
  model: Model,
  gain: float,
  repetitions: int,
  *,
  seed: int = 0,
  resamples: int = 999,
) -> float:
  """Share of candidates of a true gain that the gate accepts."""
  rng = np.random.default_rng([seed, round(1e6 * gain)])
  accepted = 0
  for repetition in range(repetitions):
    noise = statistics.s_aa(
      [
        float(session(model, rng, 0.0, against_itself=True).mean())
        for _ in range(model.sessions)
      ]
    )
    decision = statistics.decide(
      session(model, rng, gain), noise, resamples=resamples, seed=repetition
    )
    accepted += decision.verdict == statistics.ACCEPT
  return accepted / repetitions


def standard_error(rate: float, repetitions: int) -> float:
  """Of an acceptance rate."""
  return math.sqrt(max(rate * (1 - rate), 1 / repetitions) / repetitions)


def rows(
  repetitions: int, *, seed: int = 0, launches: Sequence[float] = LAUNCH_NOISE
) -> list[tuple[str, ...]]:
  """The calibration table: one row per design, noise and launch noise."""
  found: list[tuple[str, ...]] = []
  for design in DESIGNS:
    for noise in NOISES:
      for launch in launches:
        model = Model(design=design, noise=noise, launch=launch)
        rates = [
          acceptance_rate(model, gain, repetitions, seed=seed) for gain in GAINS
        ]
        found.append(
          (f"{design}, {noise}", f"{launch:.2%}", *(f"{r:.2%}" for r in rates))
        )
  return found

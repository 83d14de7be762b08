"""Which requests a session decodes, and which of them are fresh."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from experiments.controller import statistics
from experiments.controller.checks import Request

MIN_CUT = 16
"""Tokens of the shortest text that is cut to make a new request."""


def fresh(
  request: Request, used: set[str], rng: np.random.Generator
) -> Request:
  """The request, or one that no test has used: its text cut at another place.

  A text that is to be continued gives a new request for each of its
  beginnings of at least half its length. A prompt in a chat template cannot be
  cut.
  """
  ids = request.prompt_ids
  if request.id not in used or request.prompt.chat or len(ids) < MIN_CUT:
    return request
  for size in rng.permutation(np.arange(len(ids) // 2, len(ids))):
    name = f"{request.id}@{size}"
    if name not in used:
      prompt = dataclasses.replace(
        request.prompt, id=name, token_ids=tuple(ids[: int(size)])
      )
      return dataclasses.replace(request, prompt=prompt)
  return request


def for_test(
  requests: Sequence[Request],
  used: set[str],
  rng: np.random.Generator,
  warm_ups: int,
  least: int = 2 * statistics.MIN_UNITS,
) -> tuple[list[Request], list[Request], int]:
  """Requests in drawn order, each cut anew where it can be; those to warm up
  with; and how many of the first an earlier test or screening has used.

  Fewer pairs, all of fresh requests, are taken where they are enough for a
  decision.

  Args:
    used: ids of earlier tests and screenings.
    warm_ups: requests that are kept for warming up.
    least: requests that are enough for a decision, an even number.
  """
  drawn = [requests[i] for i in rng.permutation(len(requests))]
  drawn = [fresh(request, used, rng) for request in drawn]
  drawn.sort(key=lambda request: request.id in used)
  count = (len(requests) - warm_ups) // 2 * 2
  new = sum(request.id not in used for request in drawn)
  if least <= new < count:
    count = new - new % 2
  seen = sum(request.id in used for request in drawn[:count])
  return drawn[:count], drawn[count : count + warm_ups], seen


def for_screening(
  requests: Sequence[Request],
  used: set[str],
  rng: np.random.Generator,
  warm_ups: int,
  count: int,
) -> tuple[list[Request], list[Request]]:
  """So many requests in drawn order, used ones first: the more are left to
  tests; and those to warm up with."""
  drawn = [requests[i] for i in rng.permutation(len(requests))]
  drawn.sort(key=lambda request: request.id not in used)
  return drawn[:count], drawn[count : count + warm_ups]

"""Chunks of waiting prompts ride in verify passes.

A prompt that is read while others decode has passes of its own between their
steps: the weights are read once for the chunk and once for the drafts, and
those that decode wait. A pass over few nodes is bound by the weights it reads;
the rows of a chunk beside them cost little. So the chunk rides in the verify
pass, where the deployment's profile says that it is cheaper there.

The scheduler asks only where a prompt and decoding requests would wait for each
other. A chunk that rides drafts nothing: it is committed, and the drafter's
context takes it in, as a pass of its own would have done.
"""

import dataclasses

from specpilot_jax.decoding.batch.scheduler import Load
from specpilot_jax.mechanisms.step_costs import StepCosts


@dataclasses.dataclass(frozen=True)
class PromptAdmission:
  """The scheduler's `ride`.

  Attributes:
    places: of a pass, for rows of a prompt.
    chunk: tokens of a prompt that a pass of its own takes.
    nodes: of a request in a verify pass.
    costs: of the deployment; None where it was not profiled: then chunks
      always ride.
  """

  places: int
  chunk: int
  nodes: int
  costs: StepCosts | None = None

  def __call__(self, load: Load, unread: int) -> int:
    """Tokens that ride; 0 where a pass of their own is cheaper by token."""
    riding = min(unread, self.places)
    if self.costs is None:
      return riding
    verified = load.decoding * self.nodes
    alone = min(unread, self.chunk)
    more = self.costs.at(verified + riding) - self.costs.at(verified)
    own = self.costs.at(alone)
    return riding if more * alone <= own * riding else 0

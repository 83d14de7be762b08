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


def riding(
  unread: int, *, places: int, chunk: int, more_us: float, own_us: float
) -> int:
  """Tokens of a prompt that ride in the next step.

  Both kinds of pass have a fixed shape, and cost the same however many of their
  places for a prompt are filled.

  Args:
    unread: tokens of the prompt, at least 1.
    places: for a prompt in a verify pass.
    chunk: of a pass of its own.
    more_us: that a verify pass takes with a prompt in it.
    own_us: that a pass over a prompt takes.

  Returns:
    As many as there are places for; 0 where by token a pass of their own is
    cheaper.
  """
  with_others, alone = min(unread, places), min(unread, chunk)
  return with_others if more_us * alone <= own_us * with_others else 0

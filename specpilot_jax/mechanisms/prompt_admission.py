"""Chunks of waiting prompts ride in verify passes.

A prompt that is read while others decode has passes of its own between their
steps: the weights are read once for the chunk and once for the drafts, and
those that decode wait. A pass over few nodes is bound by the weights it reads;
the rows of a chunk beside them cost little. So the chunk rides in the verify
pass, where the deployment's profile says that it is cheaper there.

Time is not all that a prompt costs. While it is read its slot emits nothing,
nor do the free slots of those that wait behind it, since prompts are read one
after the other. So a prompt is not read in small pieces where that takes many
rounds more: with 32 places in a pass and 768 tokens to read 16 slots would hold
four requests that decode.

The scheduler asks only where a prompt and decoding requests would wait for each
other. A chunk that rides drafts nothing: it is committed, and the drafter's
context takes it in, as a pass of its own would have done.
"""


def riding(
  unread: int,
  *,
  places: int,
  chunk: int,
  more_us: float,
  own_us: float,
  idle_us: float = 0.0,
) -> int:
  """Tokens of a prompt that ride in the next step.

  A verify pass has a fixed shape, and costs the same however many of its places
  for a prompt are filled. The rest of the prompt is read the way that costs
  least, in passes and in rounds that idle slots wait for it.

  Args:
    unread: tokens of the prompt, at least 1.
    places: for a prompt in a verify pass.
    chunk: of a pass of its own.
    more_us: that a verify pass takes with a prompt in it.
    own_us: that passes over all that is unread take, no others in them.
    idle_us: what slots without drafts lose in a round: the time of a pass times
      what they would add to it.

  Returns:
    As many as there are places for; 0 where passes of their own are cheaper.
  """
  riding = -(-unread // places) * (more_us + idle_us)
  apart = own_us + -(-unread // chunk) * idle_us
  return min(unread, places) if riding <= apart else 0

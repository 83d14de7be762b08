"""Replay of policies on lattices made by hand and at random."""

import itertools
import re

import numpy as np
import pytest

from experiments.cost_model import lattices, replay
from specpilot_jax.errors import SpecPilotError


def recording(output, tokens, scores, order=None, counts=None, **fields):
  tokens = np.asarray(tokens, np.int32)
  n, slots = tokens.shape[:2]
  return lattices.Recording(
    request=fields.get("request", "r"),
    looped=fields.get("looped", False),
    prompt_length=3,
    output=np.asarray(output, np.int32),
    tokens=tokens,
    scores=np.asarray(scores, np.float16),
    order=order,
    counts=np.full(n, slots, np.int16) if counts is None else counts,
  )


def random_recording(seed, n=12, slots=4, candidates=3, conditional=False):
  rng = np.random.default_rng(seed)
  tokens = np.stack(
    [[rng.permutation(5)[:candidates] for _ in range(slots)] for _ in range(n)]
  )
  shape = (n, slots, candidates) + ((candidates,) if conditional else ())
  scores = -np.sort(rng.exponential(1.0, shape), axis=-1)
  order = None
  if conditional:
    order = np.argsort(rng.random(shape), axis=-1).astype(np.uint8)
  return recording(rng.integers(0, 5, n), tokens, scores, order)


def every_path(r, position):
  """{tokens of a path: score} of the whole lattice, by recursion."""
  out: dict[tuple[int, ...], float] = {}

  def walk(path, place, score):
    slot = len(path)
    if slot == r.num_slots:
      return
    for rank in range(r.tokens.shape[2]):
      if r.order is None:
        at, s = rank, r.scores[position, slot, rank]
      else:
        at = r.order[position, slot, place, rank]
        s = r.scores[position, slot, place, rank]
      longer = (*path, int(r.tokens[position, slot, at]))
      out[longer] = score + float(s)
      walk(longer, at, out[longer])

  walk((), 0, 0.0)
  return out


def paths_of(tree):
  out: list[tuple[int, ...]] = []
  for node in tree:
    before = out[node.parent] if node.parent >= 0 else ()
    out.append((*before, node.token))
  return out


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_tree_holds_the_best_nodes(seed, conditional):
  r = random_recording(seed, conditional=conditional)
  for position, nodes in itertools.product(range(3), (2, 5, 9, 20, 200)):
    tree = replay.BestFirst(nodes).build(r, position)
    paths = paths_of(tree)
    assert len(paths) == len(set(paths))
    scores = every_path(r, position)
    assert len(tree) == min(nodes - 1, len(scores))
    for path, node in zip(paths, tree, strict=True):
      assert node.score == pytest.approx(scores[path])
      assert node.slot == len(path) - 1
    top = tuple(replay.chain(r, position, nodes - 1).tolist())
    chain = {top[:k] for k in range(1, len(top) + 1)}
    assert chain <= set(paths)
    # What is not of the chain is the best of the rest.
    rest = sorted(s for p, s in scores.items() if p not in chain)[::-1]
    mine = sorted(scores[p] for p in paths if p not in chain)[::-1]
    assert mine == pytest.approx(rest[: len(mine)])


def test_depth_limits_paths_and_chain():
  r = random_recording(0)
  tree = replay.BestFirst(9, depth=2).build(r, 0)
  assert max(node.slot for node in tree) == 1 and len(tree) == 8


def test_equal_scores_take_the_lower_id():
  r = recording([7], [[[9, 4, 6]]], [[[0.0, -1.0, -1.0]]])
  assert [n.token for n in replay.BestFirst(3).build(r, 0)] == [9, 4]


def test_a_budget_of_the_chain_is_the_chain():
  r = random_recording(1, n=40)
  tree = replay.replay([r], replay.BestFirst(1 + r.num_slots))
  assert tree == replay.replay([r], replay.Chain(r.num_slots))


def test_acceptance_by_hand():
  # At 0 the chain 1 2 is right for one token; the tree has 3 under 1.
  r = recording(
    [1, 3, 5, 6],
    [[[1, 4], [2, 3]], [[3, 1], [5, 5]], [[0, 5], [6, 0]], [[6, 0], [0, 1]]],
    np.tile(np.log([0.6, 0.4]), (4, 2, 1)),
  )
  assert replay.replay([r], replay.Chain(2)).emitted == ((2, 1, 1),)
  # Nodes: 1, 1-2, then 4 (0.4), then 4-2 and 1-3 (0.24 both, 2 before 3).
  assert replay.replay([r], replay.BestFirst(4)).emitted == ((2, 2),)
  assert replay.replay([r], replay.BestFirst(5)).emitted == ((2, 2),)
  full = replay.replay([r], replay.BestFirst(6))
  assert full.emitted == ((3, 1),)
  assert full.tau == 2 and full.steps == 2


def test_counts_and_missing_candidates_end_a_chain():
  scores = np.zeros((3, 2, 1))
  scores[1, 1] = -np.inf
  r = recording(
    [1, 1, 1], np.ones((3, 2, 1)), scores, counts=np.asarray([0, 2, 2])
  )
  assert replay.chain(r, 0, 2).size == 0
  assert replay.chain(r, 1, 2).size == 1
  assert replay.replay([r], replay.Chain(2)).emitted == ((1, 2),)
  assert len(replay.BestFirst(9).build(r, 1)) == 1


def test_agreement_counts_from_the_real_boundaries():
  r = random_recording(2, n=30)
  policy = replay.Chain(3)
  emitted = replay.replay([r], policy).emitted[0]
  assert replay.agreement(r, policy, emitted) == len(emitted)
  wrong = [1] * len(r)
  right = sum(
    policy.accepted(r, i) == 0 or i == len(r) - 1 for i in range(len(r))
  )
  assert replay.agreement(r, policy, wrong) == right


def test_conditional_chain_follows_its_parents():
  # Under candidate 1 of the first slot the second slot prefers candidate 0.
  order = np.asarray([[[[1, 0], [0, 1]], [[1, 0], [0, 1]]]], np.uint8)
  scores = np.full((1, 2, 2, 2), -0.5)
  r = recording([0], [[[10, 11], [20, 21]]], scores, order)
  assert replay.chain(r, 0, 2).tolist() == [11, 20]


def test_rank_sorts_and_drops_strangers():
  tokens, scores = lattices.rank(
    np.asarray([[5, 3, 9, -1, 2]]),
    np.asarray([[-1.0, -1.0, 0.0, 0.0, -1e9]]),
    valid_vocab=8,
  )
  assert tokens[0, :3].tolist() == [3, 5, 2]
  assert scores[0, :2].tolist() == [-1, -1] and np.isfinite(scores[0, 2])
  assert (scores[0, 3:] == -np.inf).all()


@pytest.mark.parametrize("conditional", [False, True])
def test_files_come_back(tmp_path, conditional):
  path = tmp_path / lattices.LATTICES
  before = [
    random_recording(i, n=3 + i, conditional=conditional) for i in range(3)
  ]
  lattices.save(path, before)
  after = lattices.load(path)
  for a, b in zip(before, after, strict=True):
    for field in ("output", "tokens", "scores", "order", "counts"):
      np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
    assert (a.request, a.looped, a.prompt_length) == (
      b.request, b.looped, b.prompt_length,
    )  # fmt: skip
  assert not list(tmp_path.glob(".*"))
  # Compact: two bytes per score, two or four per id.
  with np.load(path) as file:
    assert file["scores"].dtype == np.float16
    assert file["tokens"].dtype == np.uint16


def test_large_ids_come_back(tmp_path):
  r = random_recording(3)
  r.tokens[0, 0, 0] = 248_000
  lattices.save(tmp_path / "a.npz", [r])
  again = lattices.load(tmp_path / "a.npz")[0]
  np.testing.assert_array_equal(again.tokens, r.tokens)


def test_bad_files(tmp_path):
  path = tmp_path / lattices.LATTICES
  with pytest.raises(SpecPilotError, match="no recorded lattices"):
    lattices.load(path)
  path.write_bytes(b"PK nonsense")
  with pytest.raises(SpecPilotError, match="damaged|lattices.npz"):
    lattices.load(path)
  np.savez(path, format=np.asarray(7))
  with pytest.raises(SpecPilotError, match="format 7, expected 1"):
    lattices.load(path)
  np.savez(path, format=np.asarray(1))
  with pytest.raises(SpecPilotError, match="damaged"):
    lattices.load(path)


def test_bad_recordings():
  good = random_recording(0)
  with pytest.raises(SpecPilotError, match="NaN"):
    recording(good.output, good.tokens, good.scores * np.nan)
  with pytest.raises(SpecPilotError, match=re.escape("scores of shape")):
    recording(good.output, good.tokens, good.scores[:, :2])

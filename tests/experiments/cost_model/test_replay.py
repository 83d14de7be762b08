"""Replay of policies on lattices made by hand and at random."""

import itertools
import re
from typing import Any

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
  right = sum(not policy.path(r, i) or i == len(r) - 1 for i in range(len(r)))
  assert replay.agreement(r, policy, wrong) == right


def test_conditional_chain_follows_its_parents():
  # Under candidate 1 of the first slot the second slot prefers candidate 0.
  order = np.asarray([[[[1, 0], [0, 1]], [[1, 0], [0, 1]]]], np.uint8)
  scores = np.full((1, 2, 2, 2), -0.5)
  r = recording([0], [[[10, 11], [20, 21]]], scores, order)
  assert replay.chain(r, 0, 2).tolist() == [11, 20]


def test_rank_sorts_and_drops_strangers():
  tokens, scores, order = lattices.rank(
    np.asarray([[[5, 3, 9, -1, 2, 6]]]),
    np.asarray([[[-1.0, -1.0, 0.0, 0.0, -1e9, np.nan]]]),
    valid_vocab=8,
  )
  assert order is None
  assert tokens[0, 0, :3].tolist() == [3, 5, 2]
  assert scores[0, 0, :2].tolist() == [-1, -1]
  assert np.isfinite(scores[0, 0, 2]) and (scores[0, 0, 3:] == -np.inf).all()


def test_rank_sorts_under_every_parent():
  rng = np.random.default_rng(0)
  tokens = np.stack([[rng.permutation(9)[:4] for _ in range(3)] for _ in "ab"])
  scores = np.round(rng.normal(0, 2, (2, 3, 4, 4)))  # With ties.
  same, ranked, order = lattices.rank(tokens, scores, valid_vocab=8)
  np.testing.assert_array_equal(same, tokens)
  assert order is not None and order.dtype == np.uint8
  for n, slot, parent in np.ndindex(2, 3, 4):
    expected = sorted(
      (-scores[n, slot, parent, place], tokens[n, slot, place], place)
      for place in range(4)
      if tokens[n, slot, place] < 8 and not (slot == 0 and parent)
    )
    row, k = ranked[n, slot, parent], len(expected)
    assert row[:k].tolist() == [-score for score, _, _ in expected]
    assert (row[k:] == -np.inf).all()
    assert order[n, slot, parent, :k].tolist() == [p for _, _, p in expected]


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


@pytest.mark.parametrize("conditional", [False, True])
def test_a_sweep_is_a_replay_of_every_budget(conditional):
  recordings = [
    random_recording(seed, n=25, slots=6, conditional=conditional)
    for seed in range(3)
  ]
  budgets = (1, 2, 5, 7, 16, 40)
  settings: dict[str, Any]
  for settings in ({}, {"depth": 3}, {"blind": True}):
    swept = replay.sweep(
      recordings, replay.BestFirst(40, **settings), reversed(budgets)
    )
    assert tuple(swept) == budgets
    for nodes, found in swept.items():
      one = replay.replay(recordings, replay.BestFirst(nodes, **settings))
      assert found == one
    assert swept[1].tau == 1 and swept[40].tau > swept[2].tau > 1
  swept = replay.sweep(recordings, replay.Chain(6), range(1, 8))
  for nodes, found in swept.items():
    assert found == replay.replay(recordings, replay.Chain(nodes - 1))
  with pytest.raises(ValueError, match="budgets"):
    replay.sweep(recordings, replay.Chain(6), [8])


def test_blind_trees_take_the_scores_under_first_choices():
  differ = 0
  for seed in range(10):
    r = random_recording(seed, slots=5, conditional=True)
    order = r.order
    assert order is not None
    tokens, scores = np.zeros_like(r.tokens), r.scores[:, :, 0].copy()
    for i in range(len(r)):
      parent = 0
      for slot in range(5):
        row = order[i, slot, parent]
        tokens[i, slot] = r.tokens[i, slot][row]
        scores[i, slot] = r.scores[i, slot, parent]
        parent = row[0]
    flat = recording(r.output, tokens, scores)
    for at in range(len(r)):
      blind = replay.BestFirst(12, blind=True).build(r, at)
      aware = replay.BestFirst(12).build(r, at)
      expected = replay.BestFirst(12).build(flat, at)
      assert paths_of(blind) == paths_of(expected)
      assert [n.score for n in blind] == [n.score for n in expected]
      # The parents' first choices are the same chain in all of them.
      assert paths_of(blind)[:5] == paths_of(aware)[:5]
      differ += paths_of(blind) != paths_of(aware)
    # A lattice without parents is blind already.
    assert replay.replay([flat], replay.BestFirst(12, blind=True)) == (
      replay.replay([flat], replay.BestFirst(12))
    )
  assert differ > 50

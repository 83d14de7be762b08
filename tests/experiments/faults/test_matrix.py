"""The matrix on the stand-in engine: which check sees which fault."""

import dataclasses
import json

import pytest

from experiments.controller import sandbox, tree
from experiments.controller.launch import Launch
from experiments.controller.process import EngineFault
from experiments.faults import batched, catalogue, injected, matrix
from experiments.faults.catalogue import Fault
from experiments.faults.job import chosen
from specpilot_jax.decoding.engine import Engine
from specpilot_jax.decoding.sampling import SamplingParams
from specpilot_jax.errors import SpecPilotError
from tests.decoding import kit
from tests.exploits import standin
from tests.notes import in_full_form

LATE = 40
"""Position from which the stand-in's late faults act."""

# Code in the place of the injection, by fault.
CODE = {
  "none": "pass",
  "late": (
    "real = engine.choose\n"
    f"engine.choose = lambda p: (real(p) + (len(p) > {LATE})) % engine.VOCAB"
  ),
  "late_but_rare": (
    "real = engine.choose\n"
    f"engine.choose = lambda p: (real(p) + (len(p) > {10 * LATE}))"
    " % engine.VOCAB"
  ),
  "early": (
    "real = engine.Engine.stream\n"
    "def fewer(self, prompt, sampling):\n"
    "  sampling.max_tokens = min(sampling.max_tokens, 7)\n"
    "  yield from real(self, prompt, sampling)\n"
    "engine.Engine.stream = fewer"
  ),
  "clock": "import time\nreal = time.perf_counter\ntime.perf_counter = lambda: real() / 10",  # fmt: skip # noqa: E501
  "broken": "engine.no_such_function",
  "broken_later": (
    "def broken(self, prompt, sampling):\n"
    "  raise TypeError('an unexpected argument')\n"
    "  yield\n"
    "engine.Engine.stream = broken"
  ),
  "dies": (
    "real = engine.Engine.stream\n"
    "calls = []\n"
    "def dies(self, prompt, sampling):\n"
    "  calls.append(1)\n"
    "  if len(calls) > 1:\n"
    "    raise SystemExit(3)\n"
    "  yield from real(self, prompt, sampling)\n"
    "engine.Engine.stream = dies"
  ),
  "drafts": (
    "real = engine.Engine.stream\n"
    "def alone(self, prompt, sampling):\n"
    "  tokens = []\n"
    "  for chunk in real(self, prompt, sampling):\n"
    "    tokens += chunk.token_ids\n"
    "  for i, token in enumerate(tokens):\n"
    "    last = i == len(tokens) - 1\n"
    "    n = len(tokens)\n"
    "    m = engine.Metrics([1] * n, [0] * n, [0] * n, [0] * n, 0)\n"
    "    out = engine.Output(tokens, 'length', None, None, m)\n"
    "    yield engine.Chunk([token], out if last else None)\n"
    "engine.Engine.stream = alone"
  ),
}
FAULTS = {
  "none": Fault(name="none", says="", harmless=True),
  "late": Fault(name="late", says="", late=True),
  "late_but_rare": Fault(name="late_but_rare", says="", late=True),
  "early": Fault(name="early", says=""),
  "clock": Fault(name="clock", says="", harmless=True),
  "broken": Fault(name="broken", says="", harmless=True),
  "broken_later": Fault(name="broken_later", says=""),
  "dies": Fault(name="dies", says=""),
  "drafts": Fault(name="drafts", says="", harmless=True),
}


def force(stock, mine):
  return standin.judge({"candidate": mine, "stock": stock})


@pytest.fixture(scope="module", name="rows")
def _rows(tmp_path_factory):
  place = tmp_path_factory.mktemp("faults")
  requests = {
    "short": standin.requests(2, 12), "long": standin.requests(1, 64)
  }  # fmt: skip

  def launch(name: str, files) -> Launch:
    built = tree.build(place / name, files)
    return Launch(
      name="candidate",
      tree=built,
      settings=standin.SETTINGS,
      place=place / f"{name}-place",
      layers=sandbox.available(),
      step_s=5.0,
    )

  def decode(name: str, files, part: str):
    return matrix.decode(
      launch(f"{name}-{part}", files), "candidate", requests[part],
      standin.VOCAB, standin.RECORD,
    )  # fmt: skip

  stock = {part: decode("stock", standin.base(), part) for part in requests}
  rows = []
  for name, fault in FAULTS.items():
    files = catalogue.faulty(standin.base(), fault)
    body = "".join(f"  {line}\n" for line in CODE[name].splitlines())
    files[catalogue.INJECTED] = (
      "def from_file():\n  from specpilot_jax.decoding import engine\n" + body
    ).encode()
    for part in requests:
      try:
        mine = decode(name, files, part)
      except EngineFault as e:
        mine = e
      rows.append(
        matrix.judge(
          fault, part, stock[part], mine, config=standin.config(),
          tokenizer=None, force=force, late=LATE,
        )
      )  # fmt: skip
  return rows


def test_verdicts(rows):
  told = matrix.verdicts(rows, list(FAULTS.values()))
  assert {name: verdict for name, (verdict, _) in told.items()} == {
    "none": "passes",
    "late": "caught",
    "late_but_rare": "below",
    "early": "caught",
    "clock": "passes",
    "broken": "broken",
    "broken_later": "broken",
    "dies": "caught",
    "drafts": "passes",
  }
  assert "forcing: r0: token" in told["late"][1]
  assert "endings" in told["early"][1]
  assert "short: process: died" in told["dies"][1]
  assert "no_such_function" in told["broken"][1]
  assert "an unexpected argument" in told["broken_later"][1]
  good = {k: v for k, v in told.items() if not k.startswith("broken")}
  assert matrix.status(good) == 0
  assert matrix.status(good | {"broken": told["broken"]}) == 1


def test_the_late_one_is_seen_by_long_outputs_alone(rows):
  seen = {row.part: row.proved for row in rows if row.fault == "late"}
  assert seen == {"short": False, "long": True}
  # Nothing late in the short ones: they bound nothing either.
  (short,) = [r for r in rows if r.fault == "late" and r.part == "short"]
  assert short.tokens == 0 and short.bound is None


def test_tau_is_an_alarm_and_no_proof(rows):
  for row in rows:
    if row.fault == "drafts":
      assert set(row.caught) == {"tau"} and not row.proved


def test_the_bound(rows):
  """Of 95 % confidence: (1 - p)^tokens = 0.05."""
  (row,) = [r for r in rows if r.fault == "late_but_rare" and r.part == "long"]
  assert row.tokens > 0 and row.bound is not None
  assert (1 - row.bound) ** row.tokens == pytest.approx(0.05)
  json.dumps(row.as_dict())


def test_outputs_that_differ_unseen_are_missed():
  fault = Fault(name="x", says="")
  row = matrix.Row("x", "long", {"tau": "1"}, 0, 1, 9)
  assert matrix.verdicts([row], [fault])["x"][0] == "missed"
  seen = dataclasses.replace(row, caught={"forcing": "gap"})
  harmless = dataclasses.replace(fault, harmless=True)
  assert matrix.verdicts([seen], [harmless])["x"][0] == "false alarm"


def test_the_catalogue():
  ids = [fault.id for fault in catalogue.CATALOGUE]
  assert len(set(ids)) == len(ids)
  assert {f.name for f in catalogue.CATALOGUE} == set(injected.NAMES)
  sizes = [
    f.size for f in catalogue.CATALOGUE if f.name == "logit_bias_after_2048"
  ]
  assert (min(sizes), max(sizes)) == (0.01, 5.0)
  assert chosen([]) == list(catalogue.CATALOGUE)
  assert [f.id for f in chosen(["early_end"])] == ["early_end=20"]
  with pytest.raises(SpecPilotError, match="unknown fault 'x'"):
    chosen(["x"])


def test_the_shipped_engine_has_no_fault():
  """Nothing of a fault is in a tree without one."""
  base = tree.read_base()
  assert not any("faults" in path for path in base)
  assert all(b"experiments.faults" not in data for data in base.values())


@pytest.fixture(name="decodes", scope="module")
def _decodes():
  """A small engine, alone: its outputs are what a batch's must be."""
  target = kit.build(kit.hybrid(), "float32")

  def decode():
    engine = Engine(target, max_seq_len=64, prefill_chunk=16)
    engine.warm_up(SAMPLING)
    made = engine.num_compilations
    outputs = [engine.generate(PROMPT, SAMPLING).token_ids for _ in range(2)]
    # Whatever happens in a batch is compiled before it is timed.
    assert engine.num_compilations == made
    return outputs

  return decode, decode()


SAMPLING = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPT = [(5 * i + 3) % kit.hybrid().vocab_size for i in range(11)]


@in_full_form
@pytest.mark.parametrize("name", batched.NAMES)
def test_faults_of_batches(decodes, name, monkeypatch):
  """In a batch of three, in slots that were used, a request is what it is
  alone; with a fault it is not."""
  decode, alone = decodes
  monkeypatch.setattr(batched, "_replace", monkeypatch.setattr)
  batched.inject(name)
  assert (decode() == alone) == (name == "batch")

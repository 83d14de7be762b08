"""The job `paired_test` end to end on a tiny model, with a patch."""

import json

import pytest

from experiments import results
from experiments.controller import session
from tests.experiments import tiny
from tests.exploits import standin

WORDS = ("the cat", "on the mat", "the mat", "x", "cat on", "a", "été", "b c")


@pytest.fixture(scope="module", name="files")
def _files(tmp_path_factory):
  folder = tmp_path_factory.mktemp("paired")
  tiny.save_model(folder / "model")
  lines = [
    {"id": f"p{i}", "domain": "d", "prompt": f"{a} {b}"}
    for i, (a, b) in enumerate(zip(WORDS, WORDS[::-1], strict=True))
  ]
  (folder / "prompts.jsonl").write_text(
    "".join(json.dumps(line) + "\n" for line in lines)
  )
  return folder


def flags(files, *more):
  return (
    "--job=paired_test",
    f"--target={files / 'model'}",
    f"--prompts={files / 'prompts.jsonl'}",
    "--dtype=float32",
    "--max_tokens=24",
    "--prefill_chunk=16",
    *more,
  )


def patch() -> bytes:
  """A new module of the engine, and a line that uses it: it says that it was
  there, and decodes as stock does."""
  path = "specpilot_jax/decoding/stops.py"
  text = (results.Path(__file__).parents[3] / path).read_text()
  new = "specpilot_jax/mechanisms/told.py"
  return (
    standin.diff(
      path,
      text,
      text + "\nfrom specpilot_jax.mechanisms import told  # noqa\n",
    )
    + (
      f"diff --git a/{new} b/{new}\nnew file mode 100644\n--- /dev/null\n"
      f"+++ b/{new}\n@@ -0,0 +1,2 @@\n"
      '+"""Says that it is here."""\n+print("patched code runs")\n'
    ).encode()
  )


def test_a_patch_goes_through_everything(files, monkeypatch, capsys):
  monkeypatch.setenv("SPECPILOT_DATA", str(files / "data"))
  # Two units on a busy machine: stock may well be slower than alone.
  monkeypatch.setattr(session, "SLOWED", 99.0)
  (files / "c.patch").write_bytes(patch())
  (files / "c.flags").write_text(
    f"--set=num_drafts=3\n--patch={files / 'c.patch'}\n--max_tokens=24\n"
  )
  status = tiny.run(
    *flags(
      files,
      f"--candidate={files / 'c.flags'}",
      f"--output_dir={files / 'run'}",
    )
  )
  out = capsys.readouterr().out
  assert status == 0, out
  result = results.read_result(files / "run")
  test = result["paired_test"]
  # Two units of eight prompts, and no A/A sessions: no gate, but a proof.
  assert test["verdict"]["verdict"] == "inconclusive"
  exact = test["verdict"]["exactness"]
  assert (exact["verdict"], exact["identical"], exact["outputs"]) == (
    "pass", 4, 4,
  )  # fmt: skip
  assert result["token_forcing"]["candidate"]["verdict"] != "fail"
  assert len(test["log_ratios"]) == 2
  assert test["familywise"] == pytest.approx(0.05)
  assert test["trees"]["stock"] != test["trees"]["candidate"]
  assert "patched code runs" in test["printed"]["candidate"]
  assert "patched code runs" not in test["printed"]["stock"]
  assert result["trials"][0]["patch"] is True
  records = results.read_requests(files / "run")
  assert {r["system"] for r in records} == {"stock", "candidate"}
  assert "Paired test" in (files / "run" / "report.md").read_text()
  assert tiny.run("--job=report", f"--output_dir={files / 'run'}") == 0
  events = (files / "run" / "events.jsonl").read_text().splitlines()
  kinds = [json.loads(line)["event"] for line in events]
  assert kinds.index("test_begun") < kinds.index("test_ended")


@pytest.mark.parametrize(
  ("more", "reason"),
  [
    (("--num_prompts=4", "--set=num_drafts=3"), "at least"),
    # Pairs are dealt to blocks: of five requests, the fifth has none.
    (("--blocks=5", "--set=num_drafts=3"), "6 at least to measure, got 8"),
    ((), "nothing to test"),
    (("--notoken_forcing", "--set=num_drafts=3"), "cannot be off"),
    (("--patch=/not/there",), "--patch /not/there"),
    (("--candidate=not_there.flags",), "no flag file"),
    (("--devices=0,0", "--set=num_drafts=3"), "devices must differ"),
    (("--devices=a", "--set=num_drafts=3"), "devices must be indices"),
    (("--devices=0,1,2", "--set=num_drafts=3"), "devices"),
    (("--devices=0,1", "--blocks=4", "--set=num_drafts=3"), "has one"),
  ],
)
def test_bad_input(files, monkeypatch, capsys, more, reason):
  monkeypatch.setenv("SPECPILOT_DATA", str(files / "data2"))
  assert tiny.run(*flags(files, *more)) == 2
  assert reason in capsys.readouterr().err


def test_a_candidate_that_does_other_work(files, monkeypatch, capsys):
  monkeypatch.setenv("SPECPILOT_DATA", str(files / "data2"))
  (files / "d.flags").write_text("--set=num_drafts=3\n--max_tokens=12\n")
  status = tiny.run(*flags(files, f"--candidate={files / 'd.flags'}"))
  assert status == 2
  assert "--candidate: sampling" in capsys.readouterr().err

"""report.html and report.md, made from result.json and requests.jsonl.

The HTML is one file: plots are inside it, and it refers to nothing outside.
"""

import base64
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import forcing, metrics, plan, plots, results
from experiments.ablation import compare as ablation
from experiments.ablation import section as ablation_section
from experiments.blocks import Block, Heading, Plot, Table, Text
from experiments.console import number
from experiments.controller import section as paired_section
from experiments.cost_model import sections
from experiments.faults import section as faults_section
from experiments.rounds import section as round_section
from experiments.serving import section as serving_section
from experiments.settings import AR
from specpilot_jax.errors import SpecPilotError

HTML, MARKDOWN = "report.html", "report.md"

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;
padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0;font-variant-numeric:tabular-nums}
th,td{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:right}
th:first-child,td:first-child{text-align:left}
.left th,.left td{text-align:left;overflow-wrap:anywhere}
h2{margin-top:2em;border-bottom:2px solid #eee}
img{max-width:100%}
.pass{color:#00703c}.fail{color:#b00020}.inconclusive{color:#8a5a00}
.verdict{font-size:1.1em;font-weight:600}
"""

_DEFINITIONS = (
  "tau: tokens emitted per verify pass, bonus token included; pooled divides"
  " totals, per request is the mean over requests.",
  "tok/s: output tokens over the time from request to last token, prefill"
  " included. Decode tok/s leaves out the first token and the time to it.",
  "TTFT: to the first token. TPOT: (end - TTFT) / (tokens - 1). ITL: gap"
  " between chunks, one chunk per verify pass.",
  "Unconditional rate of a position: passes that accepted it over all passes;"
  " tau = 1 + their sum over passes that no stop cut (checked pass by pass:"
  " each emits its accepted drafts and one token more). Conditional:"
  " over the passes that accepted the position before and drafted this one.",
)
_ONE_AT_A_TIME = (
  "Requests are decoded one at a time, by every system in turn; the order turns"
  " around from prompt to prompt."
)


def write(
  folder: Path,
  result: Mapping[str, Any],
  records: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Path:
  """Writes both reports; returns the path of the HTML.

  Args:
    folder: of the run.
    result: result.json.
    records: requests by system.
  """
  title = f"{result['deployment']['name']}: {result['job']}"
  blocks = _blocks(result, records)
  results.write_whole(folder / MARKDOWN, _markdown(title, blocks))
  results.write_whole(folder / HTML, _html(title, blocks))
  return folder / HTML


def rewrite(folder: Path) -> Path:
  """Writes the reports of a finished run again, from its files.

  Raises:
    SpecPilotError: a file is missing or damaged, or the figures of result.json
      are not those of requests.jsonl.
  """
  result = results.read_result(folder)
  records: dict[str, list[Mapping[str, Any]]] = {}
  if result["systems"]:
    for where, record in results.read_numbered_requests(folder):
      try:
        metrics.check_identity(record)
      except metrics.MeasurementError as e:
        raise SpecPilotError(f"{where}: {e}") from None
      records.setdefault(record["system"], []).append(record)
  path = folder / results.RESULT
  try:
    _check_figures(folder / results.REQUESTS, result, records)
    return write(folder, result, records)
  except SpecPilotError:  # It is a ValueError.
    raise
  except KeyError as e:
    raise SpecPilotError(f"{path}: damaged, {e} is missing") from None
  except (TypeError, AttributeError, ValueError) as e:
    raise SpecPilotError(
      f"{path}: damaged, a field does not hold what the report shows ({e})"
    ) from None


def _check_figures(path: Path, result, records) -> None:
  """Compares result.json with what the requests give."""
  systems = result["systems"]
  for name in [*systems, *(n for n in records if n not in systems)]:
    members = records.get(name, ())
    told = systems[name]["requests"] if name in systems else 0
    if len(members) != told:
      raise SpecPilotError(
        f"{path}: {len(members)} requests of {name}, {results.RESULT} has"
        f" {told}"
      )
    reference = records.get(metrics.at_level(AR, name), ())
    figures = metrics.summarize(members, reference)
    for field, value in results.to_json(figures).items():
      if not _agree(value, systems[name][field]):
        raise SpecPilotError(
          f"{path}: {field!r} of {name} is not that of {results.RESULT}; one"
          " of the two files was changed"
        )
  told = result["ablation"]
  if told:
    again = ablation.comparisons(told["pairs"], records)
    if not _agree(results.to_json(again), told["comparisons"]):
      raise SpecPilotError(
        f"{path}: the comparisons of the ablation are not those of"
        f" {results.RESULT}; one of the two files was changed"
      )
  if systems and results.sha256(path) != result["requests_sha256"]:
    raise SpecPilotError(
      f"{path}: not the file that {results.RESULT} was made from (its SHA-256"
      " is another)"
    )


def _agree(a: Any, b: Any) -> bool:
  """Equal, floats up to rounding: another NumPy may add in another order."""
  if isinstance(a, dict) and isinstance(b, dict):
    return a.keys() == b.keys() and all(_agree(a[key], b[key]) for key in a)
  if isinstance(a, list) and isinstance(b, list):
    return len(a) == len(b) and all(map(_agree, a, b))
  if isinstance(a, float) and isinstance(b, int | float):
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
  return a == b


def _blocks(result, records) -> list[Block]:
  blocks: list[Block] = [Text(_headline(result))]
  systems, forced = result["systems"], result["token_forcing"]
  for name, verdict in forced.items():
    blocks.append(
      Text(
        forcing.describe_verdict(name, verdict), f"verdict {verdict['verdict']}"
      )
    )
  blocks += [Text(f"Note: {note}") for note in result["notes"]]
  if systems:
    blocks += serving_section.blocks(systems)
    if result["ablation"]:
      blocks += ablation_section.blocks(result)
    blocks += _speed(systems)
    blocks += _acceptance(systems, records)
  if result["round"]:
    blocks += round_section.blocks(result)
  if result["faults"]:
    blocks += faults_section.blocks(result)
  if result["paired_test"]:
    blocks += paired_section.blocks(result["paired_test"])
  if result["cost_model"]:
    blocks += sections.blocks(result["cost_model"])
  if forced:
    blocks += _forcing(forced)
  blocks += _run(result)
  return blocks


def _headline(result) -> str:
  d, e = result["deployment"], result["environment"]
  law = result["sampling"].get("temperature")
  sets = ", ".join(result["prompts"].get("sets", ()))
  chat = " with the chat template" if result["prompts"].get("chat") else ""
  turns = (
    ", the first turn alone" if result["prompts"].get("turns") == 1 else ""
  )
  return (
    f"Target {d['target']} ({d['weights']}), drafter {d['drafter']}, on"
    f" {d['device']} ({e['platform']}, {e['cores']} cores). Prompts:"
    f" {result['prompts'].get('requests')} of {sets}{chat}{turns}, temperature"
    f" {law:g}, {_at_once(d['batch'])}."
  )


def _at_once(batch: int) -> str:
  if batch == 1:
    return "one request at a time"
  return f"at most {batch} requests at once"


def _speed(systems) -> list[Block]:
  rows, latency = [], []
  for name, s in systems.items():
    paired = s["paired_speedup_vs_ar"]
    interval = "-"
    # Requests of a load share passes: their ratios are not independent.
    if paired and name != metrics.at_level(AR, name) and "level" not in s:
      low, high = paired["ci95"]
      interval = f"{paired['geomean']:.2f} [{low:.2f}, {high:.2f}]"
    same = s["same_output_as_ar"]
    rows.append(
      (
        name,
        number(s["output_throughput"], 1),
        number(s["speedup_vs_ar"], 2, "x"),
        number(s["decode_throughput"], 1),
        number(1e3 / s["mean_tpot_ms"] if s["mean_tpot_ms"] else None, 1),
        interval,
        number(s["acceptance_length"]),
        number(s["acceptance_length_without_loops"]),
        str(s["requests"]),
        str(s["output_tokens"]),
        "-" if same is None else f"{same} of {s['requests']}",
      )
    )
    latency += [
      (
        f"{name} {label}",
        *(
          number(s[f"{kind}_{key}_ms"], 2)
          for kind in ("mean", "median", "p90", "p95", "p99", "std")
        ),
      )
      for key, label in (
        ("ttft", "TTFT"),
        ("tpot", "TPOT"),
        ("itl", "ITL"),
        ("e2el", "E2EL"),
      )
    ]
  blocks: list[Block] = [
    Heading("Speed"),
    Table(
      (
        "system",
        "tok/s",
        "speedup",
        "decode tok/s",
        "1000 / mean TPOT",
        "paired TPOT ratio [95 %]",
        "tau",
        "tau without loops",
        "requests",
        "tokens",
        "same output as ar",
      ),
      tuple(rows),
    ),  # fmt: skip
    Table(
      ("milliseconds", "mean", "median", "p90", "p95", "p99", "std"),
      tuple(latency),
    ),
  ]
  # Of a load a part of the requests has no speed of its own.
  single = {name: s for name, s in systems.items() if "level" not in s}
  for title, field, label in (
    ("Speed by domain", "domains", "domain"),
    ("Speed by output length", "lengths", "output tokens"),
  ):
    if single:
      blocks.append(Plot(title, plots.speed_by_group(single, field, label)))
  return blocks


def _acceptance(systems, records) -> list[Block]:
  speculative = {
    name: s for name, s in systems.items() if s["acceptance"]["drafted_tokens"]
  }
  rows = tuple(
    (
      name,
      number(s["acceptance_length"]),
      number(s["acceptance_length_per_request"]),
      number(s["acceptance_length_without_loops"]),
      number(s["acceptance_length_per_request_without_loops"]),
      str(s["loop_requests"]),
      "{accepted_tokens} / {drafted_tokens}".format(**s["acceptance"]),
      number(s["acceptance"]["spec_decode_acceptance_rate"], 1, " %"),
      str(s["acceptance"]["verify_passes"]),
      str(s["acceptance"]["cut_passes"]),
    )
    for name, s in systems.items()
  )
  blocks: list[Block] = [
    Heading("Acceptance"),
    Table(
      (
        "system",
        "tau pooled",
        "tau per request",
        "pooled, no loops",
        "per request, no loops",
        "loops",
        "accepted / drafted",
        "rate",
        "passes",
        "cut passes",
      ),
      rows,
    ),  # fmt: skip
  ]
  blocks += _domains(systems)
  if not speculative:
    return blocks
  blocks += [
    Plot("Accepted drafts per pass", plots.histogram(speculative)),
    Plot("Acceptance by draft position", plots.position_rates(speculative)),
  ]
  pairs = {}
  for name in speculative:
    reference = {
      r["request"]: r["metrics"]["tpot_ms"]
      for r in records.get(metrics.at_level(AR, name), ())
    }
    pairs[name] = [
      (
        r["metrics"]["acceptance_length"],
        reference[r["request"]] / r["metrics"]["tpot_ms"],
      )
      for r in records.get(name, ())
      if r["metrics"]["tpot_ms"] and reference.get(r["request"])
    ]
  pairs = {name: points for name, points in pairs.items() if points}
  if pairs:
    blocks.append(Plot("Speedup of each request", plots.paired_speedups(pairs)))
  return blocks


def _domains(systems) -> list[Block]:
  """Acceptance and speed by domain, where there are several."""
  rows = tuple(
    (
      f"{name} {domain}",
      number(d["acceptance_length"]),
      number(d["acceptance_length_per_request"]),
      number(d["acceptance_length_without_loops"]),
      number(d["acceptance_length_per_request_without_loops"]),
      str(d["loop_requests"]),
      number(d["output_throughput"], 1),
      number(d["decode_throughput"], 1),
      number(d.get("mean_tpot_ms"), 2),
      str(d["requests"]),
      str(d["output_tokens"]),
    )
    for name, s in systems.items()
    if len(s["domains"]) > 1
    for domain, d in sorted(s["domains"].items())
  )
  if not rows:
    return []
  header = (
    "system and domain",
    "tau pooled",
    "tau per request",
    "pooled, no loops",
    "per request, no loops",
    "loops",
    "tok/s",
    "decode tok/s",
    "mean TPOT ms",
    "requests",
    "tokens",
  )
  return [Table(header, rows)]


def _forcing(forced) -> list[Block]:
  rows = []
  for name, v in forced.items():
    control = v.get("control") or {}
    rows.append(
      (
        name,
        v["verdict"],
        str(v.get("outputs", "-")),
        str(v.get("outputs_sharing_scores", "-")),
        str(v["tokens"]),
        str(v["flips"]),
        "-" if v["max_margin"] is None else f"{v['max_margin']:.3g}",
        f"{v['tolerance']:.3g}" if "tolerance" in v else "-",
        str(control.get("name", "-")),
        str(control.get("tokens", "-")),
        str(control.get("flips", "-")),
        f"{control['max_gap']:.3g}" if control else "-",
      )
    )
  blocks: list[Block] = [
    Heading("Token forcing"),
    Text(
      "Stock is given prompt and output, and every output token must be its own"
      " choice or lie within the tolerance (1.5 times the largest gap of the"
      " control, at most 0.5 logit). A flip is a token that is not its choice."
      " In bfloat16 a token above the tolerance is scored again in float32, and"
      " accepted if it is within the tolerance there."
      " An output that is token-identical to one scored before, after the same"
      " prompt with the same sampling settings, shares its scores. Endings are"
      " checked too: nothing may end earlier or later than decoding does."
    ),
    Table(
      (
        "system",
        "verdict",
        "outputs",
        "sharing scores",
        "tokens",
        "flips",
        "largest gap",
        "tolerance",
        "control",
        "control tokens",
        "control flips",
        "control's largest gap",
      ),
      tuple(rows),
    ),  # fmt: skip
  ]
  lines = [forcing.describe_adjudication(n, v) for n, v in forced.items()]
  blocks += [Text(line) for line in lines if line]
  judged = {n: v for n, v in forced.items() if v["tokens"]}
  if judged:
    blocks.append(Plot("Flips along the outputs", plots.decile_flips(judged)))
  return blocks


def _run(result) -> list[Block]:
  env = result["environment"]
  rows = [
    (name, str(value))
    for name, value in env.items()
    if name != "flags" and value is not None
  ]
  rows += [
    (f"sha256 of {name}", digest)
    for name, digest in result["deployment"].get("weights_sha256", {}).items()
  ]
  rows += [
    (f"compiling {name}", f"{c['compile_s']} s, {c['executables']} executables")
    for name, c in result["compilation"].items()
  ]
  startup = result["startup"]
  if startup:
    rows.append(
      ("seconds from process start to weights", str(startup["weights_s"]))
    )
    rows += [
      (f"seconds from process start to first token of {name}", str(seconds))
      for name, seconds in startup["first_token_s"].items()
    ]
  memory = result["device_memory"]
  if memory:
    rows += [
      (f"planned bytes: {name.replace('_', ' ')}", f"{size:,}")
      for name, size in memory["planned_bytes"].items()
    ]
    rows += [
      (f"peak bytes after {name.replace('_', ' ')}", f"{size:,}")
      for name, size in memory["peak_bytes_after"].items()
    ]
    line = plan.describe(memory)
    if line:
      rows.append(("memory", line))
  rows += [
    (f"options of {name}", ", ".join(f"{k}={v}" for k, v in o.items()))
    for name, o in (
      (name, s["options"]) for name, s in result["systems"].items()
    )
  ]
  if result["recompiles"] is not None:
    rows.append(("compiled while timed", str(result["recompiles"])))
  rows += [
    (f"seconds: {name}", str(value))
    for name, value in result["timing_s"].items()
  ]
  rows += [(f"--{name}", value) for name, value in env["flags"].items()]
  return [
    Heading("Run"),
    Table(("", ""), tuple(rows), left=True),
    Heading("Definitions"),
    *(Text(line) for line in _DEFINITIONS),
    *([Text(_ONE_AT_A_TIME)] if result["deployment"]["batch"] == 1 else []),
  ]


def _html(title: str, blocks: Sequence[Block]) -> str:
  body = [f"<h1>{html.escape(title)}</h1>"]
  for block in blocks:
    match block:
      case Heading(text):
        body.append(f"<h2>{html.escape(text)}</h2>")
      case Text(text, kind):
        body.append(f'<p class="{kind}">{html.escape(text)}</p>')
      case Table(header, rows, left):
        body.append(_html_table(header, rows, left))
      case Plot(caption, png):
        data = base64.b64encode(png).decode()
        label = html.escape(caption)
        body.append(
          f"<h3>{label}</h3>\n"
          f'<img alt="{label}" src="data:image/png;base64,{data}">'
        )
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
    "<body>" + "\n".join(body) + "\n</body></html>\n"
  )


def _html_table(header, rows, left: bool) -> str:
  def cells(row, tag):
    inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
    return f"<tr>{inner}</tr>"

  head = cells(header, "th") if any(header) else ""
  lines = "\n".join(cells(row, "td") for row in rows)
  return f'<table class="{"left" if left else ""}">{head}\n{lines}</table>'


def _markdown(title: str, blocks: Sequence[Block]) -> str:
  def row(cells):
    inner = " | ".join(c.replace("|", "\\|") for c in cells)
    return f"| {inner} |"

  parts = [f"# {title}"]
  for block in blocks:
    match block:
      case Heading(text):
        parts.append(f"## {text}")
      case Text(text):
        parts.append(text)
      case Table(header, rows, left):
        rule = [":--" if left or i == 0 else "--:" for i in range(len(header))]
        parts.append("\n".join([row(header), row(rule), *map(row, rows)]))
      case Plot(caption):
        parts.append(f"(plot: {caption}; see {HTML})")
  return "\n\n".join(parts) + "\n"

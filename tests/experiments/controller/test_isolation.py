"""Frames, policies and statements; exploits have the rest."""

import json
import os
import subprocess

import pytest

from experiments.controller import frames, sandbox


def test_frames_come_in_any_pieces():
  messages = [{"a": 1}, {"b": "é" * 300}, {}]
  data = b"".join(map(frames.encode, messages))
  for size in (1, 3, 7, len(data)):
    decoder, found = frames.Decoder(), []
    for start in range(0, len(data), size):
      found += decoder.feed(data[start : start + size])
    assert found == messages
    assert decoder.pending == 0


@pytest.mark.parametrize(
  ("data", "reason"),
  [
    (b"\xff\xff\xff\xff", "at most"),
    (b"\0\0\0\2{]", "not JSON"),
    (b"\0\0\0\2[]", "no JSON object"),
    (b"\0\0\0\1\xff", "not JSON"),
    (b"\0\0\x30\0" + b"[" * 0x3000, "not JSON"),
  ],
)
def test_what_is_no_frame(data, reason):
  with pytest.raises(frames.FrameError, match=reason):
    frames.Decoder().feed(data)


def test_a_frame_that_is_too_long_is_not_written():
  with pytest.raises(frames.FrameError, match="at most"):
    frames.encode({"a": "x" * frames.MAX_BYTES})


def test_a_blocking_reader():
  read, write = os.pipe()
  frames.write(write, {"a": 1})
  os.close(write)
  decoder = frames.Decoder()
  assert frames.read(read, decoder) == [{"a": 1}]
  assert frames.read(read, decoder) is None
  os.close(read)


def confined(policy: sandbox.Policy, code: str) -> str:
  done = subprocess.run(
    sandbox.command(policy, ["/bin/sh", "-c", code]),
    capture_output=True,
    text=True,
    timeout=20,
  )
  return (done.stdout + done.stderr).strip()


def test_layers_do_what_they_say(tmp_path):
  """Each layer that this machine has; the statement tells of the others."""
  layers = sandbox.available()
  (tmp_path / "secret").write_text("seen")
  (tmp_path / "own").mkdir()
  own = str(tmp_path / "own")
  policy = sandbox.Policy(
    read=["/usr", "/lib", "/lib64", "/bin", "/proc"],
    write=[own],
    landlock=layers.landlock > 0,
    namespaces=layers.namespaces,
  )
  assert confined(policy, f"echo a > {own}/x && cat {own}/x") == "a"
  told = "\n".join(layers.statement())
  found = confined(policy, f"cat {tmp_path}/secret")
  if layers.landlock:
    assert "denied" in found and "seen" not in found
    assert f"Landlock ABI {layers.landlock}" in told
  else:
    assert found == "seen" and "files: NOT" in told
  if layers.namespaces:
    assert confined(policy, "echo $$") == "1"
    # The loopback device alone, and that is down.
    lines = confined(policy, "cat /proc/self/net/route").splitlines()
    assert len(lines) <= 1
  else:
    assert "network: NOT" in told and "processes: NOT" in told


def test_a_layer_that_cannot_be_had_runs_nothing(tmp_path):
  """Asked for Landlock rules on what is not there: nothing is allowed then."""
  if not sandbox.landlock_abi():
    policy = sandbox.Policy(read=[], write=[], namespaces=False)
    assert "Landlock" in confined(policy, "echo ran")
    return
  policy = sandbox.Policy(read=["/not/there"], write=[], namespaces=False)
  assert "ran" not in confined(policy, "echo ran").split()


@pytest.mark.parametrize(
  ("layers", "missing"),
  [
    (sandbox.Layers(0, False, None), ("files: NOT", "network: NOT")),
    (sandbox.Layers(3, False, None), ("signals", "nothing is refused")),
    (sandbox.Layers(4, False, None), ("signals", "TCP alone is refused")),
    (sandbox.Layers(7, False, None), ("processes: NOT",)),
  ],
)
def test_what_is_missing_is_said(layers, missing):
  told = "\n".join(layers.statement())
  for part in missing:
    assert part in told
  assert not layers.confines_network
  assert layers.as_dict()["statement"] == layers.statement()


def test_bubblewrap_shows_what_is_listed_alone():
  policy = sandbox.Policy(read=["/usr", "/proc", "/none"], write=["/tmp"])
  line = sandbox.bubblewrap("bwrap", policy)
  assert line[0] == "bwrap" and line[-1] == "--"
  assert "--unshare-net" in line
  binds = [line[i + 1] for i, x in enumerate(line) if x == "--ro-bind"]
  assert binds == ["/usr"]
  json.dumps(line)

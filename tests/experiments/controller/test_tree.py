"""Patches and trees: what is refused, and that base + patch is what it says."""

import pathlib
import subprocess

import pytest

from experiments.controller import tree
from memory import patches
from specpilot_jax.errors import SpecPilotError

BASE = {
  "specpilot_jax/decoding/a.py": b"one\ntwo\nthree\nfour\nfive\n",
  "specpilot_jax/models/b.py": b"x\n",
  "experiments/controller/worker.py": b"w\n",
}


def diff(path: str, body: str, header: str = "", old=None, new=None) -> bytes:
  return (
    f"diff --git a/{path} b/{path}\n{header}"
    f"--- {old or 'a/' + path}\n+++ {new or 'b/' + path}\n{body}"
  ).encode()


def add(path: str, text: str = "a = 1\n", mode: str = "100644") -> bytes:
  lines = text.splitlines(keepends=True)
  body = f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{x}" for x in lines)
  return diff(path, body, f"new file mode {mode}\n", old="/dev/null")


CHANGE = diff(
  "specpilot_jax/decoding/a.py", "@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"
)


def git(folder: pathlib.Path, *args: str) -> bytes:
  command = [
    "git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(folder),
    *args,
  ]  # fmt: skip
  return subprocess.run(command, check=True, capture_output=True).stdout


def test_what_git_writes_is_read_and_gives_the_same(tmp_path):
  """Changes at both ends, two hunks, no newline at the end, adds, deletes."""
  old = dict(BASE) | {"specpilot_jax/configs.py": b"a\nb", "pallas_kernels/k.py": b"".join(b"%d\n" % i for i in range(40))}  # fmt: skip # noqa: E501
  new = dict(old) | {
    "specpilot_jax/configs.py": b"a\nc\n",
    "specpilot_jax/mechanisms/new/one.py": b"# \x0c form feed\nlast",
    "specpilot_jax/decoding/empty.py": b"",
    "pallas_kernels/k.py": b"0\n" + b"".join(b"%d\n" % i for i in range(38)),
  }
  del new["specpilot_jax/models/b.py"]
  git(tmp_path, "init", "-q")
  for files in (old, new):
    for path in set(old) - set(files):
      (tmp_path / path).unlink()
    for path, data in files.items():
      (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
      (tmp_path / path).write_bytes(data)
    git(tmp_path, "add", "-A")
    if files is old:
      git(tmp_path, "commit", "-qm", "base")
  patch = git(tmp_path, "diff", "--cached", "--no-renames")
  changes = patches.parse(patch)
  assert patches.apply(old, changes) == new
  assert {c.kind for c in changes} == {"add", "change", "delete"}


REFUSED = (
  (add("specpilot_jax/decoding/l.py", "/etc/passwd\n", "120000"), "symbolic"),
  (add("specpilot_jax/decoding/l.py", "x\n", "160000"), "submodule"),
  (add("specpilot_jax/decoding/l.py", "x\n", "100755"), "mode"),
  (
    b"diff --git a/specpilot_jax/configs.py b/specpilot_jax/configs.py\n"
    b"old mode 100644\nnew mode 100755\n",
    "change of mode",
  ),
  (
    b"diff --git a/specpilot_jax/configs.py b/specpilot_jax/configs.py\n"
    b"index 1234..5678 120000\n",
    "symbolic link",
  ),
  (
    b"diff --git a/specpilot_jax/configs.py b/specpilot_jax/models/c.py\n"
    b"similarity index 100%\n",
    "renamed",
  ),
  (
    b"diff --git a/pallas_kernels/k.py b/pallas_kernels/k.py\n"
    b"GIT binary patch\nliteral 3\n",
    "binary",
  ),
  (
    b"diff --git a/pallas_kernels/k.py b/pallas_kernels/k.py\n"
    b"Binary files a/k.py and b/k.py differ\n",
    "binary",
  ),
  (add("pallas_kernels/k.py", "x\0\n"), "binary"),
  (add("pallas_kernels/k.py").replace(b"a = 1", b"\xff"), "UTF-8"),
  (add("pallas_kernels/k.py").replace(b"\n", b"\r\n"), "carriage"),
  (add("pyproject.toml"), "build file"),
  (add("specpilot_jax/decoding/x.pth"), "build file"),
  (add("specpilot_jax/decoding/x.so"), "build file"),
  (add("experiments/flags/cpu_smoke.flags"), "build file"),
  (add(".gitattributes"), "build file"),
  (add("scripts/test.sh"), "build file"),
  (add("sitecustomize.py"), "runs sitecustomize.py by itself"),
  (add("specpilot_jax/decoding/conftest.py"), "by itself"),
  (add("specpilot_jax/decoding/__main__.py"), "by itself"),
  (add("specpilot_jax/__pycache__/x.py"), "by itself"),
  (add("experiments/controller/worker.py"), "protected"),
  (add("experiments/token_forcing.py"), "protected"),
  (add("tests/test_layout.py"), "protected"),
  (add("memory/store.py"), "protected"),
  (add("specpilot_jax/zoo/weights/target/config.json"), "protected"),
  (add("specpilot_jax/tokenizer.py"), "protected"),
  (add("jax/__init__.py"), "protected"),
  (add("specpilot_jax/decoding/data.json"), "protected"),
  (add("specpilot_jax/decoding/../../experiments/x.py"), "plain path"),
  (add("/etc/x.py"), "plain path"),
  (add("specpilot_jax//decoding/x.py"), "plain path"),
  (add("specpilot_jax/decoding/x;y.py"), "a character"),
  (add("specpilot_jax/decoding/a-b/x.py"), "no Python package"),
  (b"", "last line|empty"),
  (b"hello\n", "line 1"),
  (CHANGE + CHANGE, "twice"),
  (CHANGE[:-7], "has no end|lines that its header"),
  (CHANGE.replace(b"-1,3", b"-1,4"), "lines that its header"),
  (CHANGE.replace(b"--- a/", b"--- b/"), "expected `---"),
  (CHANGE.replace(b"@@ -1,3", b"@@ -1;3"), "hunk header"),
  (
    b"diff --git a/specpilot_jax/configs.py b/specpilot_jax/configs.py\n",
    "nothing is changed",
  ),
  (
    diff("pallas_kernels/k.py", "@@ -1 +1 @@\n-a\n+b\n", "strange\n"),
    "unknown header",
  ),
  (b"+" * (patches.MAX_BYTES + 1), "bytes"),
  # Whatever begins with a backslash once joined two lines into one.
  (CHANGE.replace(b" one\n", b" one\n\\ anything\n"), "in a hunk"),
  (
    CHANGE.replace(b" one\n", b" one\n\\ No newline at end of file\n"),
    "after the end of the file",
  ),
  (
    CHANGE.replace(b" one\n", b"\\ No newline at end of file\n one\n"),
    "in a hunk",
  ),
)


@pytest.mark.parametrize(("patch", "reason"), REFUSED)
def test_refused_by_name(patch, reason):
  with pytest.raises(patches.PatchError, match=reason):
    patches.parse(patch)


UNFIT = (
  (CHANGE.replace(b"-two", b"-2"), "does not fit"),
  (CHANGE.replace(b"@@ -1,3", b"@@ -2,3"), "does not fit"),
  (add("specpilot_jax/models/b.py"), "there already"),
  (
    diff("specpilot_jax/models/b.py", "@@ -9999,0 +1 @@\n+y\n"),
    "does not fit",
  ),
  (
    diff(
      "specpilot_jax/decoding/a.py",
      "@@ -1 +1 @@\n-one\n+1\n\\ No newline at end of file\n",
    ),
    "after the end",
  ),
  (add("specpilot_jax/models/b/__init__.py"), "beside specpilot_jax/models/b"),
  (add("specpilot_jax/models/b/c/d.py"), "beside specpilot_jax/models/b.py"),
  (add("specpilot_jax/decoding.py"), "protected|beside"),
  (
    diff("specpilot_jax/models/c.py", "@@ -1 +1 @@\n-x\n+y\n"),
    "is not there",
  ),
  (
    diff(
      "specpilot_jax/decoding/a.py", "@@ -1 +0,0 @@\n-one\n",
      "deleted file mode 100644\n", new="/dev/null",
    ),
    "not all of its lines",
  ),
)  # fmt: skip


@pytest.mark.parametrize(("patch", "reason"), UNFIT)
def test_a_patch_for_another_base(patch, reason):
  with pytest.raises(patches.PatchError, match=reason):
    patches.apply(BASE, patches.parse(patch))


def test_review():
  found = patches.review(
    patches.parse(add("pallas_kernels/k.py", "import ctypes\nx = 1\n"))
  )
  assert found == ["pallas_kernels/k.py: the interpreter: import ctypes"]
  assert patches.review(patches.parse(CHANGE)) == []


def test_a_tree_is_base_and_patch(tmp_path):
  changes = patches.parse(CHANGE + add("specpilot_jax/decoding/n.py"))
  built = tree.build(tmp_path / "c", BASE, changes)
  assert (
    (built.root / "specpilot_jax/decoding/a.py")
    .read_text()
    .startswith("one\n2\nthree\n")
  )
  stock = tree.build(tmp_path / "s", BASE)
  assert stock.manifest.root_hash != built.manifest.root_hash
  assert stock.manifest.differences(built.manifest) == [
    "specpilot_jax/decoding/a.py was changed",
    "specpilot_jax/decoding/n.py was added",
  ]
  again = tree.build(tmp_path / "again", BASE, changes)
  assert again.manifest.root_hash == built.manifest.root_hash
  for root in ("c", "s", "again"):
    tree.remove(tmp_path / root)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("act", "reason"),
  [
    (lambda p: (p / "specpilot_jax/models/b.py").write_text("y"), "changed"),
    (lambda p: (p / "specpilot_jax/models/b.py").unlink(), "missing"),
    (lambda p: (p / "extra.pth").write_text("import x"), "added"),
    (lambda p: (p / "link").symlink_to("/etc/passwd"), "symbolic link"),
  ],
)
def test_a_changed_tree_is_refused(tmp_path, act, reason):
  built = tree.build(tmp_path / "t", BASE)
  built.check()
  for folder in (built.root, built.root / "specpilot_jax/models"):
    folder.chmod(0o755)
  (built.root / "specpilot_jax/models/b.py").chmod(0o644)
  act(built.root)
  with pytest.raises(SpecPilotError, match=reason):
    built.check()


def test_the_base_is_what_an_engine_needs():
  base = tree.read_base()
  assert "specpilot_jax/decoding/engine.py" in base
  assert "specpilot_jax/zoo/weights/target/config.json" in base
  assert set(tree.WORKER) <= set(base)
  for path in base:
    assert "prompts" not in path or path.startswith("specpilot_jax/zoo/prompt")
    assert not path.startswith(("tests", "memory", "experiments/pro"))
  held = tree.protected().files
  assert {"experiments/token_forcing.py", *base} <= held.keys()

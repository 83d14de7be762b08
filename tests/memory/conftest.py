"""A small memory for tests of the store."""

import shutil

import pytest

from tests.memory import kit


@pytest.fixture(name="made", scope="module")
def _made(tmp_path_factory):
  root = tmp_path_factory.mktemp("memory")
  _, ids = kit.build(root)
  return root, ids


@pytest.fixture(name="place")
def _place(made, tmp_path):
  """A copy to damage, and the ids of its entries."""
  root, ids = made
  shutil.copytree(root, tmp_path / "memory")
  return tmp_path / "memory", ids

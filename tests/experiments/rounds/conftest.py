"""A deployment whose engine is the stand-in."""

import pytest

from tests.experiments.rounds import deployment


@pytest.fixture(name="settings")
def _settings(monkeypatch, tmp_path):
  """Settings of the stand-in, and a lab that takes it for the engine."""
  monkeypatch.setenv("SPECPILOT_DATA", str(tmp_path / "data"))
  deployment.install(monkeypatch.setattr)
  return deployment.settings()

"""Tests of the registry and of each mechanism."""

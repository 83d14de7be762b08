"""Tests of the package experiments."""

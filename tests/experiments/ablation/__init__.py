"""Tests of ablations."""

"""Tests of rounds."""

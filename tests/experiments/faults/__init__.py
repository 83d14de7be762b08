"""Tests of fault injection."""

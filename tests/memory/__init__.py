"""Tests of the memory."""

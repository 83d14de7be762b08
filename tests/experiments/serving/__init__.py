"""Tests of loads."""

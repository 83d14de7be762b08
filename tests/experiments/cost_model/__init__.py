"""Tests of the cost model."""

"""Faults put into engines from outside, and which check sees each."""

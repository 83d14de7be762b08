"""Learned drafters: Flax modules, and what makes them drafters of an engine."""

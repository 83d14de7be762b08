"""Flax (NNX) target models: one definition for prefill, decode and verify."""

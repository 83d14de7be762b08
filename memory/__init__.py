"""Structured memory: what was proved, kept as patches that replay.

No entries and no code yet; the package holds the place in the import order
(pallas_kernels, specpilot_jax, memory, experiments).
"""

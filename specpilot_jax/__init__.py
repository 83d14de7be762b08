"""SpecPilot-JAX: a speculative-decoding engine in JAX that proves itself.

A target model's output is decoded faster by letting a drafter propose tokens
that the target verifies several at a time; the output is the target's own,
token for token. Models are Flax NNX modules, everything that changes while
decoding is an explicit state, and an optimisation is a mechanism behind an
option whose default is the drafter's released decoding loop ("stock").
"""

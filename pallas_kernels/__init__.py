"""Operations of the engine, one file per kernel family.

A file holds an operation's definition in plain JAX, which is its reference;
GPU kernels stand beside it as further implementations of the same function.
Nothing here imports the engine.
"""

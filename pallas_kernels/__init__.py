"""GPU kernels in Pallas, one file per family.

Each file holds the plain-JAX reference that defines the operation, the Pallas
kernel that computes the same, a table of tile sizes per GPU, and one dispatch
between them. Nothing here knows of models, drafters or decoding: functions
take arrays and return arrays, and this package imports none of the others.
"""

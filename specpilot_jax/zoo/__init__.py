"""Small trained models that ship with the package, and how they were trained.

A zoo model has the head geometry of the hybrid family at a size that decodes
on a CPU, with a drafter trained on its own features and its own text, so that
acceptance lengths are those of a trained pair and not of random weights.
"""

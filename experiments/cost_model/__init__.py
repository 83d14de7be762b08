"""Phase 0: how far a deployment is from its ceiling, and where the gap is.

    ceiling = tau factor x kernel factor x overhead factor

* tau factor: the best-first tree at its best node budget over the chain that
  stock verifies, both replayed exactly on recorded lattices (`replay`).
* kernel factor: profiled step time, the union of kernel intervals, over the
  sum of the kernel classes' floors (`kernels`, `floors`).
* overhead factor: measured step time over profiled step time.

A run of `--job=profile` records what that needs (`recorder`, `measure`) in its
folder; `model` computes everything from the files, on any machine, and

    python -m experiments.cost_model DIR

does so again for a folder.
"""

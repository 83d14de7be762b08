"""Optimisations behind options whose defaults leave decoding at stock.

One module or folder per mechanism, and the registry of their options. The
engine runs without this package: `models/` and `decoding/` never import it.
"""

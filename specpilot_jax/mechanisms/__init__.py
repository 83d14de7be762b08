"""Optimisations behind options whose defaults leave decoding at stock.

One module or folder per mechanism. The engine offers a few named hooks and
runs with this package empty: `models/` and `decoding/` never import it.
"""

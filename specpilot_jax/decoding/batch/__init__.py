"""Many requests in one pass."""

"""One decoding step: draft, tree, verify, accept, commit; and the engine."""

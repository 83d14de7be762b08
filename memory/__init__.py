"""What was proved, kept so that it replays on the next deployment.

An entry is a record (an option's registration, its correctness constraints,
settings and limits), a patch relative to the entries it depends on, and the
evidence. Entries are data under `memory/entries/`; the code here stores,
checks and replays them. It uses the engine and is used by the experiments.
"""

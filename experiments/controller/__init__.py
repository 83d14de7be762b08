"""The controller: what measures candidates, proves them, and decides.

A candidate is code that is not trusted. The controller builds its tree itself,
runs it in a process of its own that reaches neither references nor stock,
times it with its own clock over pipes, and checks every output that it timed.
"""

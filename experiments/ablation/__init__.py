"""Ablations: a deployment with one option, several, or each mechanism varied.

    python -m experiments.main --flagfile=cpu_smoke.flags \\
      --ablate=node_budget=8,16,32
    python -m experiments.main --flagfile=cpu_smoke.flags --ablate=mechanisms

`design` makes systems of what is asked, the jobs decode the same requests with
all of them in turn, `compare` holds them against each other request by request,
`section` reports it.
"""

"""What is run: benchmarks, token forcing, tests of candidates, reports.

`experiments.main` is the entry point, `experiments.fetch` gets real models and
prompt sets, `experiments.cost_model` computes the cost model of a finished run
again, `experiments/flags/` holds one flag file per deployment. This
package may import all the others and none of them imports it.
"""

"""The suite: one gradient by torchmali, beside torchdiffeq, torchode, TorchDiffEqPack and diffrax.

    python -m benchmarks.suite.fixed        a given number of steps: time, evaluations, peak memory; growth with N
    python -m benchmarks.suite.adaptive     given tolerances
    python -m benchmarks.suite.precision    work to reach a given gradient error
    python -m benchmarks.suite.outputs      evaluations against the number of output times

`problems` knows neither torch nor jax. `torch_methods` and `jax_methods` solve a problem by each method, `worker` is
the process that one of them runs in, `driver` starts the workers, makes rounds and writes records, `limits` judges
these. `benchmarks.report` makes docs/performance.md of the records.
"""

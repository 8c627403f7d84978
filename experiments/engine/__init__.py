"""Engine of the experiments: tasks and their configs, a queue that runs them, records, training with checkpoints."""

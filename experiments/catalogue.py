"""All experiments, by name."""

from __future__ import annotations

from experiments import toy
from experiments.runner import Experiment

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            name="toy",
            what="errors of gradients on dz/dt = alpha z, against the ODE's and the discrete one",
            shows="Figure 4 a, b; its appendix for T < 1",
            presets=toy.PRESETS,
            main=toy.main,
            takes={"smoke": "10 s", "cpu": "3 min", "paper": "7 min"},
        ),
    )
}

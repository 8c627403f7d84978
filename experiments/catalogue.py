"""All experiments, by name."""

from __future__ import annotations

from experiments import accounting, digits, explain, memory, stability, toy
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
        Experiment(
            name="memory",
            what="peak memory of one gradient against tolerance and number of steps",
            shows="Figure 4 c",
            presets=memory.PRESETS,
            main=memory.main,
            takes={"smoke": "10 s", "cpu": "1 min", "paper": "1 min"},
        ),
        Experiment(
            name="accounting",
            what="computation, memory, depth and reverse accuracy, counted, beside the paper's formulas",
            shows="Table 1",
            presets=accounting.PRESETS,
            main=accounting.main,
            takes={"smoke": "5 s", "cpu": "30 s", "paper": "30 s"},
        ),
        Experiment(
            name="stability",
            what="regions of stability, eigenvalues, orders, and errors of ways back, against the theorems",
            shows="Theorems 2.1, 3.1, 3.2; the appendix's figure of stability",
            presets=stability.PRESETS,
            main=stability.main,
            takes={"smoke": "8 s", "cpu": "40 s", "paper": "20 min"},
        ),
        Experiment(
            name="explain",
            what="the paper's drawings, from real runs: trials and steps, two ways back, reconstruction",
            shows="Figures 1, 2, 3",
            presets=explain.PRESETS,
            main=explain.main,
            takes={"smoke": "2 s", "cpu": "2 s", "paper": "5 s"},
        ),
        Experiment(
            name="digits",
            what="the smallest training: digits by a network with an ODE block, five gradient methods",
            shows="no table of the paper; a check of the training loop",
            presets=digits.PRESETS,
            main=digits.main,
            takes={"smoke": "10 s a method", "cpu": "20 s to 90 s a method"},
            data="scikit-learn's digits (comes with it)",
            methods=digits.METHODS,
        ),
    )
}

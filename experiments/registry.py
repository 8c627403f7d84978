"""All experiments, by name."""

from __future__ import annotations

from experiments.engine.task import Experiment
from experiments.flows import images as flows
from experiments.flows import memory as flow_memory
from experiments.flows import plane as densities
from experiments.images import recognition as images
from experiments.images import solvers
from experiments.matching import steering
from experiments.matching import training as matching
from experiments.series import latent, paths, solving
from experiments.theory import accounting, explain, feasibility, memory, stability, toy

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
            what="recognition of scikit-learn's digits by a small ResNet and its Neural ODE twin",
            shows="Figure 5, small",
            presets=images.DIGITS,
            main=images.main,
            takes={"smoke": "5 s a method", "cpu": "1 min to 6 min a run"},
            data="scikit-learn's digits (comes with it)",
            methods=images.NAMES,
            usual=("naive", "adjoint", "seminorm", "aca", "mali"),
            seeds=(0, 1, 2, 3, 4),
        ),
        Experiment(
            name="mnist",
            what="the same for MNIST, of which 10,000 images",
            shows="Figure 5, small",
            presets=images.MNIST,
            main=images.main,
            takes={"smoke": "5 s a method", "cpu": "5 min (MALI)"},
            data="MNIST",
            methods=images.NAMES,
            usual=("resnet", "mali"),
        ),
        Experiment(
            name="cifar10",
            what="recognition of CIFAR-10 by a ResNet and its Neural ODE twin",
            shows="Figure 5",
            presets=images.CIFAR,
            main=images.main,
            takes={
                "smoke": "5 s a method",
                "cpu": "3 min to 40 min a run",
                "paper": "estimated, not run: 6e16 FLOP a run with MALI, some 5 h on a GPU of 2017",
            },
            data="CIFAR-10",
            methods=images.NAMES,
            usual=("resnet", "aca", "mali"),
            seeds=(0, 1, 2),
        ),
        Experiment(
            name="imagenet",
            what="recognition of ImageNet, or any folder of pictures, by ResNet18 and its Neural ODE twin",
            shows="Figure 6",
            presets=images.FOLDER,
            main=images.main,
            takes={
                "smoke": "10 s a method",
                "paper": "estimated, not run: 5e18 FLOP a run with MALI, some 5 days on 4 GPUs of 2017",
            },
            data="ImageNet (a folder of pictures)",
            methods=images.NAMES,
            usual=("resnet", "adjoint", "mali"),
        ),
        Experiment(
            name="solvers",
            what="a network trained with one solver, run and attacked with others; a ResNet run as an ODE",
            shows="Tables 2, 3; Figure 6, small",
            presets=solvers.PRESETS,
            main=solvers.main,
            takes={"smoke": "10 s a method", "cpu": "2 min a run", "cpu-cifar10": "15 min a run"},
            data="scikit-learn's digits (comes with it); CIFAR-10 for cpu-cifar10",
            methods=solvers.NAMES,
            seeds=(0, 1, 2),
        ),
        Experiment(
            name="feasibility",
            what="peak memory of one step of the full network for ImageNet, and what fits a GPU of 11 GB",
            shows="Section 4.2: naive and ACA cannot train on ImageNet",
            presets=feasibility.PRESETS,
            main=feasibility.main,
            takes={"smoke": "5 s", "cpu": "30 min, 16 GB of memory"},
        ),
        Experiment(
            name="latent",
            what="a latent ODE that fills the gaps in trajectories of MuJoCo's Hopper, by gradient method",
            shows="Table 4; Table 7",
            presets=latent.PRESETS,
            main=latent.main,
            takes={"smoke": "10 s a method", "cpu": "8 min a run", "paper": "estimated: 15 h a run with MALI"},
            data="HopperPhysics, or simulated (mujoco, dm_control)",
            methods=latent.NAMES,
            usual=("naive", "adjoint", "aca", "mali", "rnn", "gru_d"),
            seeds=(0, 1),
        ),
        Experiment(
            name="paths",
            what="Neural CDEs that recognise spoken words, speakers, or digits read row by row, by gradient method",
            shows="Table 5; Table 7",
            presets=paths.PRESETS,
            main=paths.main,
            takes={
                "smoke": "5 s a method",
                "cpu": "10 min a run, the adjoint 30",
                "cpu-digits": "1 min a run",
                "cpu-vowels": "3 min a run",
                "cpu-published": "1 h (MALI)",
                "paper": "estimated: 15 h a run with MALI",
            },  # fmt: skip
            data="Speech Commands; JapaneseVowels; scikit-learn's digits (come with it) for cpu-digits",
            methods=solving.NAMES,
            usual=("adjoint", "seminorm", "naive", "aca", "mali"),
            seeds=(0, 1, 2),
        ),
        Experiment(
            name="flows",
            what="images as samples of a continuous flow (FFJORD, RNODE), by gradient method: bits per dimension",
            shows="Table 6, its samples",
            presets=flows.PRESETS,
            main=flows.main,
            takes={
                "smoke": "10 s a method",
                "cpu": "5 to 12 min a run",
                "cpu-mnist": "6 to 15 min a run",
                "cpu-cifar10": "6 to 14 min a run",
                "cpu-mnist-long": "14 min",
                "paper-mnist": "not run",
                "paper-cifar10": "not run",
                "paper-imagenet64": "not run",
            },
            data="scikit-learn's digits (come with it); MNIST, CIFAR-10, ImageNet",
            methods=tuple(flows.METHODS),
            usual=("vanilla", "rnode", "rnode05", "seminorm", "mali"),
            seeds=(0, 1),
        ),
        Experiment(
            name="flow_memory",
            what="memory of one training step of the published flow of CIFAR-10, by method and tolerance",
            shows="Table 1, for flows",
            presets=flow_memory.PRESETS,
            main=flow_memory.main,
            takes={"smoke": "10 s", "cpu": "2 min"},
        ),
        Experiment(
            name="densities",
            what="densities in the plane that a continuous flow learns, and how points move in it",
            shows="nothing of the paper's; pictures that teach",
            presets=densities.PRESETS,
            main=densities.main,
            takes={"smoke": "5 s", "cpu": "8 to 14 min a data set"},
        ),
        Experiment(
            name="matching",
            what="flow matching of MNIST or CIFAR-10 by a small U-Net with labels: the network that others steer",
            shows="nothing of the paper's; a network for sampling, steering and inversion",
            presets=matching.PRESETS,
            main=matching.main,
            takes={"smoke": "5 s", "cpu": "1 h", "cpu-cifar10": "not run"},
            data="MNIST; CIFAR-10; scikit-learn's digits (come with it) for smoke",
        ),
        Experiment(
            name="steering",
            what="noise optimised through the sampler: inpainting, deblurring, labels, by gradient method",
            shows="nothing of the paper's; memory, time and use of gradients through a sampler",
            presets=steering.PRESETS,
            main=steering.main,
            takes={"smoke": "10 s", "cpu": "20 min"},
            data="MNIST, and the weights of `matching`; scikit-learn's digits (come with it) for smoke",
        ),
    )
}

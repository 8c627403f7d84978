"""Checklist of the paper: every sentence or table that claims something measurable, and what is made of it.

A sentence is judged by a function of a chapter that makes claims with its id, or it says the same as another one
(`same_as`), or it cannot be tested here (`not_testable` says why). Words are the paper's; its symbols and formulas
stand in brackets.
"""

from __future__ import annotations

from typing import NamedTuple


class Sentence(NamedTuple):
    """A sentence of the paper. where: its section, figure or table. reference: a table of numbers, not a sentence."""

    id: str
    where: str
    words: str
    same_as: tuple[str, ...] = ()
    not_testable: str = ""


NO_IMAGENET = "ImageNet and four GPUs are not at hand; `experiments run imagenet --preset paper` makes the runs."
FIRST = "Who was the first cannot be measured."

SENTENCES = (
    # Abstract and introduction
    Sentence("abstract-adjoint", "Abstract", "suffer from inaccuracy in reverse-time trajectory", ("reverse-adjoint",)),
    Sentence(
        "abstract-memory", "Abstract", "have a memory cost that grows with integration time", ("memory-naive-aca",)
    ),
    Sentence(
        "abstract-constant", "Abstract",
        "which has a constant memory cost w.r.t number of solver steps in integration similar to the adjoint method",
        ("memory-constant",),
    ),
    Sentence(
        "abstract-accuracy", "Abstract",
        "guarantees accuracy in reverse-time trajectory (hence accuracy in gradient estimation)", ("reverse-mali",),
    ),
    Sentence(
        "abstract-imagenet", "Abstract",
        "MALI is the first to enable feasible training of a Neural ODE on ImageNet and outperform a well-tuned ResNet",
        not_testable=f"{FIRST} {NO_IMAGENET}",
    ),
    Sentence(
        "abstract-fail", "Abstract", "existing methods fail due to either heavy memory burden or inaccuracy",
        ("imagenet-memory", "imagenet-adjoint"),
    ),
    Sentence(
        "abstract-series", "Abstract", "for time series modeling, MALI significantly outperforms the adjoint method",
        ("mujoco", "speech"),
    ),
    Sentence(
        "abstract-flows", "Abstract",
        "for continuous generative models, MALI achieves new state-of-the-art performance", ("flows-sota",),
    ),
    Sentence(
        "intro-adjoint", "Section 1",
        "the adjoint method suffers from numerical errors due to the inaccuracy in reverse-time trajectory",
        ("reverse-adjoint",),
    ),
    Sentence(
        "intro-aca", "Section 1", "the memory consumption of ACA still grows linearly with integration time",
        ("memory-naive-aca",),
    ),
    Sentence(
        "intro-scale", "Section 1",
        "neither ACA nor naive method are suitable for large scale datasets (e.g. ImageNet) or high-dimensional "
        "Neural ODEs (e.g. FFJORD", ("imagenet-memory", "flow-memory"),
    ),
    Sentence(
        "intro-reconstruct", "Section 1", "we can accurately reconstruct the trajectory from the end-time value",
        ("reconstruct",),
    ),
    Sentence(
        "intro-resnet", "Section 1, contribution 2a",
        "MALI enables a Neural ODE to achieve better accuracy than a well-tuned ResNet with the same number of "
        "parameters",
    ),
    Sentence(
        "intro-first", "Section 1, contribution 2a",
        "MALI is the first method to enable training of Neural ODEs on a large-scale dataset such as ImageNet",
        not_testable=f"{FIRST} {NO_IMAGENET}",
    ),
    Sentence(
        "intro-series", "Section 1, contribution 2b",
        "In time-series modeling, MALI achieves comparable or better results than other methods",
    ),
    Sentence(
        "flows-sota", "Section 1, contribution 2c",
        "a FFJORD model trained with MALI achieves new state-of-the-art results on MNIST and Cifar10",
        not_testable="A state of the art needs the published size, hours on several GPUs: the presets paper-mnist and "
        "paper-cifar10 of `flows` make the runs.",
    ),
    # Section 2: the methods before
    Sentence("cost-naive", "Section 2.3, Table 1", "the computation is doubled considering both forward and backward "
             "passes"),
    Sentence(
        "deep-graph", "Section 2.3", "the deep computation graph might cause vanishing or exploding gradient"
    ),
    Sentence("depth-naive", "Section 2.3, Table 1", "backpropagates through the search process hence has deeper "
             "computation graphs"),
    Sentence("cost-adjoint", "Table 1, computation of the adjoint", "N_z N_f (N_t + N_r) m"),
    Sentence(
        "reverse-solve", "Section 2.3, Theorem 2.1",
        "the reverse-time trajectory (red curve, [z(tau)]) cannot match the forward-time trajectory (blue curve, "
        "[z(t)]) accurately",
    ),
    Sentence("reverse-adjoint", "Section 2.3, Table 1", "hence affects the accuracy in gradient estimation"),
    Sentence("cost-aca", "Table 1, computation of ACA", "N_z N_f N_t (m + 1)"),
    Sentence("memory-naive-aca", "Section 2.3, Table 1", "Though the memory cost is much smaller than the naive "
             "method, it grows linearly with [N_t]"),
    # Section 3: ALF and MALI
    Sentence("reconstruct", "Section 3.1", "we can reconstruct the entire trajectory accurately due to the "
             "reversibility of ALF"),
    Sentence("order", "Section 3.1, Theorem 3.1", "the local truncation error of [z] is [O(h^3)], and the "
             "local truncation error of [v] is [O(h^2)]"),
    Sentence("stability", "Section 3.1, Theorem 3.2", "the stability region is empty; when [0 < eta < 1], the "
             "stability region is non-empty"),
    Sentence("bounded", "Section 3.1", "in practice we always use a bounded [T] and ALF performs well"),
    Sentence("memory-constant", "Section 3.2", "also has a constant memory cost w.r.t time step [N_t]"),
    Sentence("memory-v", "Section 3.2", "Compared with the adjoint method, MALI only requires extra [N_z] memory "
             "to record [v]"),
    Sentence("reverse-mali", "Section 3.2, Table 1", "Our method guarantees the accuracy of reverse-time trajectory"),
    Sentence(
        "more-accurate", "Section 3.2",
        "the gradient estimation in MALI is more accurate compared to the adjoint method",
    ),
    Sentence("cost-mali", "Section 3.2, Table 1", "The overall computation burden is [N_z N_f N_t (m + 2)] "
             "as in [Table 1]"),
    Sentence("depth-mali", "Section 3.2, Table 1", "The computation graph of MALI is much shallower than the naive "
             "method"),
    # Section 4.1
    Sentence("toy", "Section 4.1, Figure 4 a, b", "ACA and MALI have similar errors, both outperforming other methods"),
    Sentence(
        "toy-memory", "Section 4.1, Figure 4 c",
        "the naive method and ACA increase memory consumption, while MALI and the adjoint method have a constant "
        "memory cost",
    ),
    # Section 4.2
    Sentence(
        "cifar-accuracy", "Section 4.2, Figure 5",
        "MALI achieves comparable accuracy to ACA, and both significantly outperform the naive and the adjoint method",
    ),
    Sentence(
        "cifar-speed", "Section 4.2, Figure 5",
        "the training speed of MALI is similar to ACA, and both are almost two times faster than the adjoint "
        "memthod, and three times faster than the naive method",
    ),
    Sentence(
        "imagenet-memory", "Section 4.2",
        "the naive method and ACA are unable to train a Neural ODE on ImageNet with 4 GPUs; only MALI and the adjoint "
        "method are feasible due to the constant memory",
    ),
    Sentence("imagenet-resnet", "Section 4.2, Figure 6", "the accuracy of the Neural ODE trained with MALI closely "
             "follows ResNet"),
    Sentence("imagenet-adjoint", "Section 4.2, Figure 6", "significantly outperforms the adjoint method (top-1 "
             "validation: 70% v.s. 63%)"),
    Sentence(
        "invariance", "Section 4.2, Table 2", "Neural ODE consistently achieves high accuracy (70%)"
    ),
    Sentence("resnet-random", "Section 4.2, Table 2", "ResNet drops to random guessing (0.1%) because ResNet as a "
             "one-step Euler discretization fails to be a meaningful dynamical system"),
    Sentence("same-as-rk2", "Table 2, h = 1", "MALI 42.33, RK2 42.33"),
    Sentence("loose", "Table 2, tolerance 1", "RK23 50.77, Dopri5 52.3, Heun-Euler 68.48, MALI 62.56"),
    Sentence("fgsm", "Section 4.2, Table 3", "For different combinations of solvers and perturbation amplitudes, "
             "Neural ODE consistently outperforms ResNet"),
    Sentence("fgsm-solvers", "Section 4.2, Table 3", "due to its invariance to discretization scheme, we derive the "
             "gradient for attack using a certain solver"),
    Sentence(
        "images-summary", "Section 4.2",
        "Neural ODE is accurate, invariant to discretization scheme, and more robust to adversarial attack than ResNet",
        ("intro-resnet", "invariance", "fgsm"),
    ),
    # Section 4.3
    Sentence("mujoco", "Section 4.3, Table 4", "MALI achieves similar MSE to ACA, and both outperform the adjoint and "
             "naive method"),
    Sentence("mujoco-rnn", "Table 4", "10%: RNN 2.45, RNN-GRU 1.97, Latent-ODE 0.31 to 0.47"),
    Sentence("mujoco-ratios", "Table 4", "MALI: 10% 0.35, 20% 0.27, 50% 0.26"),
    Sentence("speech", "Section 4.3, Table 5", "MALI achieves a higher accuracy than competing methods"),
    # Section 4.4
    Sentence(
        "flows", "Section 4.4, Table 6",
        "For continuous models, MALI consistently generates the lowest BPD, and outperforms the Vanilla FFJORD "
        "(trained with adjoint), RNODE (regularized FFJORD) and the SemiNorm Adjoint",
    ),
    Sentence(
        "flows-discrete", "Section 4.4, Table 6",
        "FFJORD trained with MALI achieves comparable BPD to state-of-the-art discrete-layer flow models in the "
        "literature", not_testable="Discrete flows have published numbers at the published size alone, where the flows "
        "here were not trained.",
    ),
    Sentence("flow-memory", "Section 1; Table 1, for flows", "suitable for large scale datasets (e.g. ImageNet) or "
             "high-dimensional Neural ODEs (e.g. FFJORD"),
    Sentence(
        "conclusion-first", "Section 6",
        "our method is the first to achieve accuracy, fast speed and a constant memory cost", not_testable=FIRST,
    ),
    Sentence(
        "conclusion-sota", "Section 6",
        "achieved new state-of-the-art results in various tasks, including image recognition, continuous generative "
        "modeling, and time-series modeling", ("intro-resnet", "flows-sota", "mujoco", "speech"),
    ),
    # Appendix
    Sentence("boundary", "Appendix A.4", "the solver is on the critical boundary of A-stability; otherwise, the solver "
             "is not A-stable"),
    Sentence("order-damped", "Appendix A.5", "For a single step in Damped ALF with stepsize [h], the local "
             "truncation error of [z] is [O(h^2)]"),
    Sentence("stability-shrinks", "Appendix A.5, figure of stability", "As [eta] increases, the area of stability "
             "decreases"),
    Sentence("same-parameters", "Appendix B.1", "hence they have the same number of parameters"),
    Sentence(
        "fine-enough", "Appendix B.1",
        "a stepsize of 0.25 is sufficiently small to train a meaningful continuous model that is robust to "
        "discretization scheme", ("invariance",),
    ),
    Sentence(
        "higher-order", "Appendix B.1",
        "our Neural ODE achieves 70.21% top-1 accuracy, which is higher than both the same solver during training "
        "(MALI, 69.59% accuracy) and the ResNet18 (70.09% accuracy)",
    ),
    Sentence(
        "appendix-attack", "Appendix B.1",
        "Neural ODE consistently achieves a higher accuracy than ResNet under the same attack", ("fgsm",),
    ),
    Sentence("toy-short", "Appendix B.4, figure for t < 1", "MALI and ACA generate smaller error than the adjoint and "
             "the naive method"),
    Sentence("damping", "Appendix B.5, Table 7", "MALI is robust to different [eta] values"),
)  # fmt: skip
BY_ID = {sentence.id: sentence for sentence in SENTENCES}

"""What the paper proves about damped ALF (Appendix A.5), checked on the step that we take."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from torchmali import ALF, FixedStep, solve
from torchmali.state.floats import Floats

ETAS = [0.95, 0.9, 0.85, 0.7, 0.3, 0.25]


def step_matrices(eta: float, h: float, sigma: np.ndarray) -> np.ndarray:
    """The step over h for dz/dt = sigma z as matrices on (z, v), from steps of the unit vectors: (n, 2, 2) for n real
    sigma; for complex ones (n, 4, 4), with z and v as pairs of a real and an imaginary part.
    """
    a, b = torch.from_numpy(np.real(sigma).copy()), torch.from_numpy(np.imag(sigma).copy())
    if np.iscomplexobj(sigma):
        m = torch.stack([torch.stack([a, -b], -1), torch.stack([b, a], -1)], -2)  # (n, 2, 2)
    else:
        m = a[:, None, None]  # (n, 1, 1)
    n, d, _ = m.shape
    unit = torch.eye(2 * d, dtype=torch.float64).expand(n, 2 * d, 2 * d)  # (n, unit vector, component)

    def f(t, z):
        return (z[0] @ m.mT,)

    start = Floats((unit[..., :d].clone(),), (unit[..., d:].clone(),))
    end = ALF(eta=eta).step(f, 0.0, h, start, None, adaptive=False).state
    return torch.cat([end.point[0], end.slope[0]], -1).mT.numpy()


def eigenvalues_of_the_theorem(eta: float, h: float, sigma: np.ndarray) -> np.ndarray:
    x = h * sigma.astype(complex)
    middle, root = 1 + eta * (x - 1), np.sqrt(eta * (2 * x + eta * (x - 1) ** 2))
    return np.stack([middle + root, middle - root], -1)


def assert_same_eigenvalues(found: np.ndarray, expected: np.ndarray) -> None:
    """Each has its counterpart on the other side, to rounding (relative to the largest)."""
    distance = np.abs(found[..., :, None] - expected[..., None, :])
    scale = np.abs(expected).max(-1, keepdims=True)
    assert np.all(distance.min(-1) < 1e-12 * scale)
    assert np.all(distance.min(-2) < 1e-12 * scale)


def random_steps(n: int) -> list[tuple[float, float, np.random.Generator]]:
    rng = np.random.default_rng()  # any draw will do
    return [(rng.uniform(0.05, 1), rng.uniform(0.01, 1) * rng.choice([-1, 1]), rng) for _ in range(n)]


def test_eigenvalues_of_a_step_are_those_of_the_theorem_for_real_sigma():
    for eta, h, rng in random_steps(50):
        # Away from the double eigenvalue, where rounding splits a pair by sqrt(eps).
        sigma = rng.uniform(-10, 10, 20)
        gap = np.abs(np.diff(eigenvalues_of_the_theorem(eta, h, sigma)))[..., 0]
        sigma = sigma[gap > 0.05]
        found = np.linalg.eigvals(step_matrices(eta, h, sigma))
        assert_same_eigenvalues(found, eigenvalues_of_the_theorem(eta, h, sigma))


def test_eigenvalues_of_a_step_are_those_of_the_theorem_for_complex_sigma():
    """As a real 4 x 4 matrix it has them and their conjugates."""
    for eta, h, rng in random_steps(50):
        sigma = rng.uniform(-10, 10, 20) + 1j * rng.uniform(-10, 10, 20)
        expected = eigenvalues_of_the_theorem(eta, h, sigma)
        expected = np.concatenate([expected, expected.conj()], -1)
        gap = np.abs(expected[..., :, None] - expected[..., None, :]) + 9 * np.eye(4)
        apart = gap.min((-2, -1)) > 0.05
        found = np.linalg.eigvals(step_matrices(eta, h, sigma[apart]))
        assert_same_eigenvalues(found, expected[apart])


@pytest.mark.parametrize("eta", [1.0, *ETAS])
def test_determinant_of_a_step_depends_on_the_damping_alone(eta):
    sigma = np.linspace(-3, 3, 13)
    for h in (0.01, 0.3, -0.2):
        np.testing.assert_allclose(np.linalg.det(step_matrices(eta, h, sigma)), 1 - 2 * eta, atol=1e-13)


def spectral_radius(eta: float, h_sigma: np.ndarray) -> np.ndarray:
    return np.abs(np.linalg.eigvals(step_matrices(eta, 1.0, h_sigma))).max(-1)


def ellipse(eta: float, angle: np.ndarray, scale: float) -> np.ndarray:
    """h sigma on the boundary of the stability region, moved away from its centre by a factor."""
    a = (1 - eta) / eta
    return -a + scale * (a * np.cos(angle) + 1j * np.sin(angle))


@pytest.mark.parametrize("eta", ETAS)
def test_stability_region_of_damped_alf_is_an_ellipse(eta):
    angle = np.linspace(0, 2 * math.pi, 73)
    assert np.all(spectral_radius(eta, ellipse(eta, angle, 0.999)) < 1)
    assert np.all(spectral_radius(eta, ellipse(eta, angle, 1.001)) > 1)
    # And no hole inside, no island outside.
    for scale in (0.0, 0.3, 0.6, 0.9):
        assert np.all(spectral_radius(eta, ellipse(eta, angle, scale)) < 1)
    for scale in (1.1, 1.5, 3.0, 10.0):
        assert np.all(spectral_radius(eta, ellipse(eta, angle, scale)) > 1)


@pytest.mark.parametrize("eta", [0.9, 0.7, 0.3])
def test_area_of_the_stability_region_is_pi_times_one_minus_eta_over_eta(eta):
    """Counted on a grid that does not know the ellipse."""
    n = 120
    width, height = 3 * (1 - eta) / eta, 3.0  # of the box around [-width, 0] x [-height/2, height/2]
    x = -width + width * (np.arange(n) + 0.5) / n
    y = height * ((np.arange(n) + 0.5) / n - 0.5)
    stable = spectral_radius(eta, (x[:, None] + 1j * y).ravel()) < 1
    area = stable.mean() * width * height
    # n^2 cells, of which some 2 n lie on the boundary and half of these errors cancel: below 1 %.
    assert area == pytest.approx(math.pi * (1 - eta) / eta, rel=0.01)


def test_undamped_alf_is_stable_nowhere_off_the_imaginary_axis():
    rng = np.random.default_rng()
    sigma = rng.uniform(-3, 3, 200) + 1j * rng.uniform(-3, 3, 200)
    sigma = sigma[np.abs(sigma.real) > 1e-3]
    assert np.all(spectral_radius(1.0, sigma) > 1)


def test_undamped_alf_neither_damps_nor_excites_oscillations_up_to_h_omega_one():
    omega = np.linspace(0.05, 0.95, 19)
    np.testing.assert_allclose(spectral_radius(1.0, 1j * omega), 1, atol=1e-12)
    assert np.all(spectral_radius(1.0, 1.05j * np.ones(1)) > 1)


@pytest.mark.parametrize("eta", [0.95, 0.85, 0.7])
def test_damping_makes_oscillations_grow(eta):
    """The price of the region: with eta < 1 the imaginary axis lies outside."""
    assert np.all(spectral_radius(eta, 1j * np.linspace(0.05, 0.95, 19)) > 1)


@pytest.mark.parametrize(("k", "n_steps"), [(8, 500), (10, 500), (10, 1000), (12, 2000)])
def test_contraction_excites_the_parasitic_mode_by_the_known_law(k, n_steps):
    """w = v - f(z) obeys w' = -f'(z) w, so that decay by e^-k makes an error of (h k)^4 / 16 e^(2k) of the solution:
    what docs/limits.md says, and why stability "when T is bounded" is no comfort.
    """
    y0 = torch.linspace(0.5, 1.5, 4, dtype=torch.float64)
    solver, controller = ALF(refresh="never"), FixedStep(1 / n_steps)
    y = solve(lambda t, y: -k * y, y0, [0.0, 1.0], solver=solver, controller=controller).y[-1]
    exact = y0 * math.exp(-k)
    error = float((y - exact).norm() / exact.norm())
    assert error == pytest.approx((k / n_steps) ** 4 / 16 * math.exp(2 * k), rel=0.02)

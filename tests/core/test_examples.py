"""The examples run, and find what they look for."""

from pathlib import Path

import pytest

from examples import bouncing_ball, learn_physics, steer_sampler


def test_the_elasticity_of_a_ball_is_learned_from_the_time_of_a_bounce(tmp_path: Path):
    found = bouncing_ball.main(["--bounces", "3", "--iterations", "6", "--out", str(tmp_path)])
    assert abs(found[-1].elasticity - bouncing_ball.TRUTH) < 1e-12
    assert (tmp_path / "bouncing_ball.png").stat().st_size > 10_000


def test_the_physics_of_a_ball_are_learned_from_its_heights(tmp_path: Path):
    result = learn_physics.main(["--iterations", "5", "--out", str(tmp_path)])
    radius, elasticity = result.ball.ground()
    assert abs(radius.item() - learn_physics.RADIUS) < 0.03 and abs(elasticity.item() - learn_physics.ELASTICITY) < 0.05
    (seen, without), (unseen, _) = result.seen.errors, result.unseen.errors
    assert seen < 0.02 < 0.1 < without and unseen < 0.1  # m
    bounces = zip(result.seen.learned.bounces, result.seen.truth.bounces, strict=True)
    assert all(abs(x - y) < 0.02 for x, y in bounces)
    assert (tmp_path / "learn_physics.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_hidden_half_of_a_digit_is_looked_for_through_all_steps(tmp_path: Path):
    result = steer_sampler.main(["--iterations", "8", "--steps", "12", "--out", str(tmp_path)])
    assert result.losses[-1] < 0.8 * result.losses[0]
    few, many = (result.peaks[n] for n in (3, 12))
    assert many[0] <= 1.05 * few[0] and many[1] > 2 * few[1]  # MALI's peak, plain autograd's
    assert (tmp_path / "steer_sampler.png").stat().st_size > 10_000

import numpy as np
import pytest

from latecomer.study.config import Tree, merged, parse
from latecomer.study.experiment import Experiment
from latecomer.study.har.skew import by_device, feature_skew, label_counts, omega_squared


def groups(offsets: list[float], n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, 3)) + offset).astype(np.float32) for offset in offsets]


def test_equal_groups_have_no_skew_at_any_size() -> None:
    assert omega_squared(groups([0, 0, 0, 0], 2000), 3).max() < 0.01
    # Uncorrected, eight groups of six would show 0.15 by chance.
    assert omega_squared(groups([0] * 8, 6), 3).mean() < 0.08


def test_different_groups_by_hand() -> None:
    # Means -1 and 1, variance 1 within: half of the variance lies between.
    assert omega_squared(groups([-1, 1], 5000), 3) == pytest.approx([0.5] * 3, abs=0.03)


def test_one_group_or_a_constant_feature_is_nan() -> None:
    assert np.isnan(omega_squared(groups([0], 10), 3)).all()
    constant = [np.ones((5, 2), np.float32)] * 2
    assert np.isnan(omega_squared(constant, 2)).all()


def test_local_scaling_removes_offsets_of_devices(scenario: Tree) -> None:
    found = {
        scale: feature_skew(_made(scenario, scale=scale).federation)
        for scale in ("global", "local")
    }
    sit = {scale: skew.by_class["sit"] for scale, skew in found.items()}
    assert sit["global"] > 0.3
    assert sit["local"] < 0.1


def test_replicas_do_not_count(scenario: Tree) -> None:
    plain, more = (_made(scenario, augment=name).federation for name in ("none", "balanced"))
    assert label_counts(plain).equals(label_counts(more))
    assert label_counts(plain).to_numpy().sum() == 360
    one = {device: len(x) for device, x in by_device(plain, 0, 1).items()}
    assert one == {device: len(x) for device, x in by_device(more, 0, 1).items()}


def _made(scenario: Tree, **data: str) -> Experiment:
    plain = {key: value for key, value in scenario.items() if key != "study"}
    return Experiment(parse(merged(plain, {"data": data})))

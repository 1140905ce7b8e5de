"""The oracle: late devices are known, but not late."""

import pytest

CONFIG = ["stop.updates=0", "stop.epochs=6", "fleet.jitter=0.2"]
LATE = ["fleet.late.classes=[5]", "fleet.late.devices=2"]


@pytest.fixture(scope="module")
def nobody_late(start):
    return start(*CONFIG, *LATE, "strategy.name=semi-async")[1]


@pytest.mark.parametrize(("kind", "delay"), [("in-flight", "4"), ("busy", "{gamma = 4}")])
def test_unstale_is_semi_async_without_the_delay(start, nobody_late, kind, delay):
    late = [*LATE, f"fleet.late.kind={kind}", f"fleet.late.delay={delay}"]
    _, oracle = start(*CONFIG, *late, "strategy.name=unstale")
    _, delayed = start(*CONFIG, *late, "strategy.name=semi-async")
    same = ("model_hash", "virtual_seconds", "versions", "updates", "accuracy_affected")
    assert {key: oracle[key] for key in same} == {key: nobody_late[key] for key in same}
    assert oracle["model_hash"] != delayed["model_hash"]
    # The devices that are late in the run it is the measure of.
    assert len(oracle["late_devices"]) == 2
    assert oracle["late_devices"] == delayed["late_devices"]
    assert oracle["client_accuracy"]["late_mean"] is not None

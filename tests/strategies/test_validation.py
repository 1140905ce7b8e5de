"""Which estimates wait for a device's next update, and the errors that it gives them."""

import pytest
import torch

from latecomer.core.messages import Contribution, Task, TrainSpec, Update
from latecomer.device.flat import flat_model
from latecomer.strategies.parts.inversion import Estimate, replay
from latecomer.strategies.parts.switch_off import SwitchOff, error
from latecomer.strategies.parts.validation import MAX_PENDING, EstimateValidation

MODEL = flat_model("mlp", (2,), 2, ())
SPEC = TrainSpec(local_epochs=1, batch_size=2, lr=0.5, momentum=0.0)
X, LABELS = torch.tensor([[1.0, -1.0], [0.5, 2.0]]), torch.tensor([0, 1])
ESTIMATE = Estimate(X, LABELS, torch.zeros(2), SPEC, steps=1)


class Recorder(SwitchOff):
    """Keeps the arguments of its calls."""

    def __init__(self):
        super().__init__()
        self.records, self.uses = [], []

    def used(self, *values):
        self.uses.append(values)

    def record(self, *values):
        self.records.append(values)


def update(version, delta, staleness=0, noise=0.0, base=None):
    base = MODEL.init(3) if base is None else base
    task = Task(9, 4, 0, "main", version, SPEC, base)
    return Contribution(task, Update(9, delta, 2, noise_std=noise), base, delta, "main", staleness)


def of(value):
    return torch.full((MODEL.layout.size,), value)


@pytest.mark.parametrize(
    ("staleness", "versions", "kept"),
    [
        (1, range(10), [0, 1, 2, 3]),  # at most four
        (8, range(10), [0, 2, 4, 6]),  # a quarter of its staleness apart
        (9, range(10), [0, 2, 4, 6]),
        (8, [0, 1, 1, 5], [0, 5]),
    ],
)
def test_estimates_that_wait_are_spread_over_the_staleness(staleness, versions, kept):
    switch = Recorder()
    validation = EstimateValidation(switch)
    for version in versions:
        validation.keep(update(0, of(0.1), staleness), ESTIMATE, version, now=100 + version)
    assert [now - 100 for _, _, now, _ in switch.uses] == kept
    assert len(kept) <= MAX_PENDING
    assert {values[:2] + values[3:] for values in switch.uses} == {("main", 4, staleness)}


def test_the_errors_of_an_estimate_by_hand():
    switch = Recorder()
    validation = EstimateValidation(switch)
    validation.keep(update(0, of(0.4), 5, noise=0.1), ESTIMATE, version=2, now=2)
    arrived = update(6, of(0.1), noise=0.05)
    validation.validate(MODEL, arrived, now=7)
    fresh = replay(MODEL, arrived.base, ESTIMATE)
    estimated = error(fresh, of(0.1), 0.05**2)
    # Both updates have noise: variances 0.05^2 and 0.1^2; the estimate has none.
    stale = (0.3**2 - 2 / torch.pi * (0.05**2 + 0.1**2)) ** 0.5
    ((*where, first, second, staleness),) = switch.records
    assert where == ["main", 4, 7]
    assert (first, second, staleness) == (pytest.approx(estimated), pytest.approx(stale), 5)
    assert validation.nearest == {4: "zero"}  # an error of about 0.1


def test_the_last_estimate_before_the_base_is_validated_and_later_ones_wait():
    switch = Recorder()
    validation = EstimateValidation(switch)
    for version, value in ((1, 0.1), (3, 0.3), (5, 0.5)):
        validation.keep(update(0, of(value), version), ESTIMATE, version, now=version)
    validation.validate(MODEL, update(0, of(0.3)), now=6)
    assert switch.records == []  # trained before any estimate was used
    validation.validate(MODEL, update(4, of(0.3)), now=6)
    validation.validate(MODEL, update(4, of(0.3)), now=7)
    validation.validate(MODEL, update(5, of(0.3)), now=8)
    assert [(now, stale) for _, _, now, _, stale, _ in switch.records] == [
        (6, pytest.approx(0.0, abs=1e-6)),
        (8, pytest.approx(0.2)),
    ]


def test_an_update_of_another_size_validates_nothing():
    switch = Recorder()
    validation = EstimateValidation(switch)
    validation.keep(update(0, torch.zeros(2), 1), ESTIMATE, version=1, now=1)
    validation.validate(MODEL, update(1, of(0.3)), now=2)
    assert switch.records == []
    assert validation.nearest == {}

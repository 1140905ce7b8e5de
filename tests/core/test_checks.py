from dataclasses import replace

import pytest
import torch

from latecomer.core.checks import Checks, LargestMedian, first_scale
from latecomer.core.messages import Offer, Task, TrainSpec, Update
from latecomer.device.client import Client
from latecomer.device.flat import flat_model
from latecomer.device.privacy import Privacy

MODEL = flat_model("mlp", (4,), 3, (5,))
TASK = Task(0, 0, 0, "main", 0, TrainSpec(), torch.zeros(4))


def of(device):
    return replace(TASK, device=device)


def update(delta, examples=5, metrics=None, noise=0.0):
    return Update(0, delta, examples, metrics or {}, noise)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (update(torch.zeros(3)), "3 values"),
        (update(torch.zeros(4, dtype=torch.float64)), "float32"),
        (update(torch.zeros(2, 2)), "2 axes"),
        (update(torch.tensor([0.0, float("nan"), 0, 0])), "not finite"),
        (update(torch.tensor([0.0, float("inf"), 0, 0])), "not finite"),
        (update(torch.full((4,), 3e38)), "not finite"),
        (update(torch.zeros(4), examples=0), "num_examples"),
        (update(torch.zeros(4), examples=-3), "num_examples"),
        (update(torch.zeros(4), examples=2.5), "num_examples"),
        (update(torch.zeros(4), metrics={"loss": float("nan")}), "metric"),
        (update(torch.zeros(4), metrics={"loss": "low"}), "metric"),
        (update(torch.zeros(4), noise=float("nan")), "noise_std"),
        (update(torch.zeros(4), noise=-1.0), "noise_std"),
        (update(torch.zeros(4), noise="much"), "noise_std"),
        (update(torch.zeros(4), metrics={"loss": 10**400}), "metric"),
        (update(torch.zeros(4), metrics={"loss": True}), "metric"),
        (Update(0, torch.zeros(4), 5, metrics=None), "metric"),
        (update(torch.zeros(4), examples=True), "num_examples"),
        (update(torch.zeros(4), examples=10**400), "num_examples"),
        (update([0.0, 0.0, 0.0, 0.0]), "delta is a list"),
        (update(torch.zeros(4), examples=10**9 + 1), "from 1 to 1,000,000,000"),
        (update(torch.zeros(4), metrics={"loss": 1.1e300}), "metric"),
        (update(torch.zeros(4), noise=1.1e6), "from 0 to 1e+06"),
        (Update(0, torch.zeros(4), 5, choice=True), "choice"),
        (Update(0, torch.zeros(4), 5, choice=1), "0 to 0"),
        (Update(0, torch.zeros(4), 5, choice=-1), "choice"),
        (Update(0, torch.zeros(4), 5, epsilon="low"), "epsilon"),
        (Update(0, torch.zeros(4), 5, epsilon=-0.1), "epsilon"),
        (Update(0, torch.zeros(4), 5, epsilon=float("inf")), "epsilon"),
        (Update(0, None, 5, epsilon=float("nan")), "epsilon"),
        (Update(0, torch.zeros(4), 5, last=1), "last"),
    ],
)
def test_malformed_updates_are_refused(bad, reason):
    assert reason in Checks().reason_to_refuse(TASK, bad)


def test_values_at_their_limits_are_accepted():
    smallest = Update(0, torch.zeros(4), 1)
    largest = Update(0, torch.zeros(4), 10**9, {"loss": -1e300}, 1e6, epsilon=1e300, last=True)
    for accepted in (smallest, largest, Update(0, None, 1)):
        assert Checks().reason_to_refuse(TASK, accepted) is None


def test_a_choice_is_the_number_of_a_model_that_was_sent():
    sent = Offer("main", 1, torch.zeros(4))
    task = replace(TASK, offers=(sent,), broadcasts=(None, sent))
    for choice, accepted in enumerate((True, True, False, True, False)):
        reason = Checks().reason_to_refuse(task, Update(0, torch.zeros(4), 5, choice=choice))
        assert (reason is None) is accepted
        assert accepted or "0 to 3" in reason


INF = float("inf")


def bounds_of(median, values):
    """The bound with ratio 1 after each (device, value)."""
    found = []
    for device, value in values:
        median.remember(device, value)
        found.append(median.bound(1))
    return found


def test_largest_median_by_hand():
    """Five devices: 1, 5, 2, 9, 6 have the median 5. Then the largest values of each count."""
    values = [(0, 1), (1, 5), (2, 2), (3, 9), (4, 6)]  # median 5
    values += [(0, 7), (0, 100)]  # 7, 5, 2, 9, 6: 6; then 100, 5, 2, 9, 6: 6
    values += [(5, 8), (6, 0), (7, 0), (8, 0)]  # 100 5 2 9 6 8: the lower of 6 and 8; then smaller
    expected = [INF] * 4 + [5, 6, 6, 6, 6, 6, 6]
    assert bounds_of(LargestMedian(window=101, warmup=20), values) == expected


def test_three_devices_need_the_warmup_of_which_each_gives_a_third():
    """Of 20 values device 0 gives 7 at most, so devices 1 and 2 must give 13."""
    median = LargestMedian(window=101, warmup=20)
    assert bounds_of(median, [(0, 1.0)] * 50 + [(1, 2.0)] * 7 + [(2, 3.0)] * 5)[-1] == INF
    assert bounds_of(median, [(2, 3.0)]) == [2.0]
    two = LargestMedian(window=101, warmup=20)
    assert bounds_of(two, [(0, 1.0), (1, 1.0)] * 50)[-1] == INF


def test_the_window_holds_the_devices_that_answered_last():
    median = LargestMedian(window=5, warmup=20)
    assert bounds_of(median, [(d, 1.0) for d in range(5)])[-1] == 1.0
    assert bounds_of(median, [(d, 9.0) for d in (5, 6, 0)]) == [1.0, 1.0, 9.0]  # 1 and 2 are out


def test_a_median_of_zero_is_no_bound():
    assert bounds_of(LargestMedian(101, 20), [(d, 0.0) for d in range(6)])[-1] == INF


def test_restored_medians_go_on_with_values_and_devices():
    first, second = LargestMedian(5, 20), LargestMedian(5, 20)
    bounds_of(first, [(d, float(d)) for d in range(5)])
    second.restore(first.state())
    assert bounds_of(second, [(0, 7.0)]) == bounds_of(first, [(0, 7.0)]) == [3.0]


def norm(value):
    return update(torch.tensor([value, 0.0, 0.0, 0.0]))


def warm(checks, devices=5, value=1.0):
    for device in range(devices):
        assert checks.reason_to_refuse(of(device), norm(value)) is None
    assert checks.trouble(devices) is None
    return checks


@pytest.mark.parametrize(
    ("params", "spec", "examples", "noise", "scale"),
    [
        ([3.0, 4.0, 0, 0], {}, 32, 0.0, 5.0),  # the norm of the model
        ([0.0, 0, 0, 0], {}, 32, 0.0, 2.0),  # sqrt(4): a model of zeros
        ([0.3, 0.4, 0, 0], {"lr": 0.1}, 320, 0.0, 8.0),  # 0.1 * 2 * 10 steps * 2 / (1 - 0.5)
        ([0.3, 0.4, 0, 0], {"lr": 0.1, "momentum": 0.0}, 321, 0.0, 4.4),  # 11 batches
        ([0.3, 0.4, 0, 0], {"lr": 0.1, "lr_scale": 0.5}, 320, 0.0, 4.0),
        ([3.0, 4.0, 0, 0], {}, 32, 10.0, 20.0),  # noise of 10 in 4 coordinates
    ],
)
def test_scale_of_a_first_update_by_hand(params, spec, examples, noise, scale):
    task = replace(TASK, params=torch.tensor(params), spec=replace(TrainSpec(), **spec))
    first = update(torch.zeros(4), examples, noise=noise)
    assert first_scale(task, first) == pytest.approx(scale)


def test_the_very_first_update_is_bounded_by_the_model():
    task = replace(TASK, params=torch.tensor([3.0, 4.0, 0, 0]))
    assert Checks().reason_to_refuse(task, norm(100.0)) is None
    assert "exceeds 100 (20 x the scale of the model)" in Checks().reason_to_refuse(
        task, norm(100.1)
    )
    assert Checks(norm_ratio=0).reason_to_refuse(task, norm(1e6)) is None


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("privacy", [None, Privacy("gaussian", 5.0, 1.0, 1e-5, "update")])
def test_honest_first_updates_pass(optimizer, zero, privacy):
    """A large learning rate, momentum, many epochs, noise, a model of zeros."""
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(60, 4, generator=rng), torch.arange(60) % 3
    spec = TrainSpec(10, 8, 0.5 if optimizer == "sgd" else 0.05, 0.9, optimizer)
    params = MODEL.init(1) * (not zero)
    task = Task(0, 0, 0, "main", 0, spec, params)
    honest = Client(0, MODEL, x, y, 1, privacy).perform(task, {})
    assert torch.linalg.vector_norm(honest.delta) > 0.1
    assert Checks().reason_to_refuse(task, honest) is None


def test_default_bounds():
    """20 times the median norm over the first five devices."""
    checks = warm(Checks())
    assert "exceeds 20 (20 x the median)" in checks.reason_to_refuse(of(5), norm(20.01))
    assert checks.reason_to_refuse(of(5), norm(20.0)) is None


def test_a_first_update_beyond_the_later_bound_is_found_on_probation():
    checks = Checks()
    assert checks.reason_to_refuse(of(0), norm(39.0)) is None  # 20 x sqrt(4) is 40
    for device in range(1, 5):
        assert checks.trouble(9) is None
        assert checks.reason_to_refuse(of(device), norm(1.0)) is None
    assert "first updates, of devices 0, exceed 20 x the median norm" in checks.trouble(9)
    assert checks.strikes == {0: 3}
    assert checks.trouble(9) is None  # once
    assert "exceeds 20" in checks.reason_to_refuse(of(0), norm(39.0))


def test_a_first_claim_of_examples_is_found_on_probation():
    checks = Checks()
    for device, examples in enumerate([5, 5, 501, 5, 5]):
        assert checks.reason_to_refuse(of(device), update(torch.ones(4), examples)) is None
    assert "devices 2," in checks.trouble(9)


def test_strikes_by_hand():
    checks, strikes = warm(Checks()), []
    for value in (99.0, 99.0, 1.0, 99.0, 99.0, 1.0, 1.0, 1.0, 1.0):
        checks.reason_to_refuse(of(0), norm(value))
        strikes.append(checks.strikes.get(0, 0))
    assert strikes == [1, 2, 1, 2, 3, 2, 1, 0, 0]


def test_trouble_is_when_the_last_updates_of_most_devices_were_refused():
    checks = warm(Checks(), 6)
    for device in (0, 1, 2):
        checks.reason_to_refuse(of(device), norm(99.0))
    assert checks.trouble(6) is None  # half
    checks.reason_to_refuse(of(3), norm(99.0))
    checks.reason_to_refuse(of(0), norm(1.0))
    assert checks.trouble(6) is None  # half again
    checks.reason_to_refuse(of(4), norm(99.0))
    assert "last updates of 4 of 6 devices were refused: norm 99" in checks.trouble(6)
    assert checks.reason_to_refuse(of(0), norm(30.0)) is None  # it starts anew
    assert checks.strikes == {}


def test_one_hostile_device_that_answers_first_is_no_trouble():
    checks = Checks()
    for _ in range(9):
        assert checks.reason_to_refuse(of(0), norm(1e6)) is not None
        assert checks.trouble(5) is None
    assert checks.strikes == {0: 9}


def test_trouble_of_a_fleet_of_one_begins_with_the_third_strike():
    checks = Checks()
    for expected in (False, False, True):
        checks.reason_to_refuse(of(0), norm(1e6))
        assert (checks.trouble(1) is not None) is expected


def test_norm_bound_does_not_shrink_as_the_fleet_converges():
    checks = warm(Checks(norm_ratio=10))
    for turn in range(300):
        assert checks.reason_to_refuse(of(turn % 50), norm(0.001)) is None
    assert checks.reason_to_refuse(of(60), norm(10.0)) is None
    assert checks.reason_to_refuse(of(60), norm(10.1)) is not None


def test_one_hostile_device_cannot_walk_the_bound_upwards():
    checks = warm(Checks(norm_ratio=10))
    for _ in range(1000):
        checks.reason_to_refuse(of(0), norm(9.0))
    assert checks.reason_to_refuse(of(0), norm(11.0)) is not None


def test_one_busy_device_cannot_keep_the_others_out():
    """It has converged, and has answered a thousand times before any other device."""
    checks = Checks(norm_ratio=10)
    for _ in range(1000):
        assert checks.reason_to_refuse(of(0), norm(0.001)) is None
    for turn in range(40):
        assert checks.reason_to_refuse(of(1 + turn % 3), norm(5.0)) is None
    assert checks.trouble(9) is None


def test_examples_far_beyond_the_median_are_refused():
    checks = Checks()
    for turn in range(30):
        assert checks.reason_to_refuse(of(turn % 5), update(torch.ones(4), 50)) is None
    assert checks.reason_to_refuse(of(1), update(torch.ones(4), 5000)) is None
    assert "exceeds 5,000" in checks.reason_to_refuse(of(1), update(torch.ones(4), 5001))
    assert "1 to 100" in Checks(max_examples=100).reason_to_refuse(TASK, update(torch.ones(4), 101))
    off = warm(Checks(examples_ratio=0))
    assert off.reason_to_refuse(TASK, update(torch.ones(4), 10**9)) is None


def test_bound_can_be_switched_off_and_state_restored():
    off, on, twin = warm(Checks(norm_ratio=0)), warm(Checks(norm_ratio=2)), Checks(norm_ratio=2)
    on.reason_to_refuse(of(3), norm(50.0))
    twin.restore(on.state())
    assert twin.state() == on.state()
    assert off.reason_to_refuse(TASK, norm(1e6)) is None
    assert twin.reason_to_refuse(TASK, norm(1e6)) == on.reason_to_refuse(TASK, norm(1e6))
    assert twin.strikes == {3: 1, 0: 1}
    assert not twin.undisturbed


GROWN = replace(TASK, params=torch.full((4,), 2.1))  # more than twice the first model
FIRST = replace(TASK, params=torch.ones(4))


def alone_first(checks, first, noise=0.0, others=0.0, model=GROWN):
    """Device 0 sends `first`; the model grows, and four others train on it."""
    assert checks.reason_to_refuse(FIRST, update(torch.full((4,), first), noise=noise)) is None
    for device in range(1, 5):
        assert checks.trouble(9) is None
        large = update(torch.full((4,), 5.0), noise=others)
        assert checks.reason_to_refuse(replace(model, device=device), large) is None
    return checks.trouble(9)


def test_norms_measured_on_a_model_that_a_first_update_made_grow_are_not_believed():
    """The update of device 0 is within 20 x the median of those that were trained on its result."""
    checks = Checks()
    assert alone_first(checks, 9.0) == "first updates, of devices 0, exceed the norm of the model"
    assert checks.strikes == {0: 3}
    assert not checks.undisturbed  # the reference is learned anew
    assert alone_first(checks, 9.0) is None  # once in a run


def test_a_model_that_grew_by_small_updates_or_did_not_grow_is_believed():
    assert alone_first(Checks(), 0.9) is None
    assert alone_first(Checks(), 9.0, model=replace(GROWN, params=torch.full((4,), 1.9))) is None
    assert alone_first(Checks(norm_ratio=0), 9.0) is None


def test_privacy_noise_explains_a_large_first_update_if_others_have_it_too():
    assert alone_first(Checks(), 9.0, noise=4.1, others=4.0) is None
    assert alone_first(Checks(), 9.0, noise=4.1, others=0.0) is not None
    assert alone_first(Checks(), 9.0, noise=1.0, others=1.0) is not None  # too small to explain 9


def test_suspects_come_out_of_a_checkpoint():
    checks, twin = Checks(), Checks()
    assert checks.reason_to_refuse(FIRST, update(torch.full((4,), 9.0))) is None
    twin.restore(checks.state())
    assert twin.state() == checks.state()
    for device in range(1, 5):
        large = update(torch.full((4,), 5.0))
        assert twin.reason_to_refuse(replace(GROWN, device=device), large) is None
    assert "devices 0," in twin.trouble(9)
    checks.restore(twin.state())
    assert alone_first(checks, 9.0) is None  # that it was once is in the checkpoint too


def test_if_most_are_refused_on_probation_the_device_that_made_the_model_grow_has_strikes():
    checks = Checks()
    assert checks.reason_to_refuse(FIRST, update(torch.full((4,), 9.0))) is None
    for device in (1, 2):
        checks.reason_to_refuse(of(device), norm(INF))
        assert checks.trouble(9) is None
    checks.reason_to_refuse(of(3), norm(INF))
    assert "3 of 4 devices were refused: delta is not finite" in checks.trouble(9)
    assert checks.strikes == {0: 3}


@pytest.mark.parametrize(("devices", "fewest"), [(15, 3), (16, 4), (100, 20), (5000, 21)])
def test_a_few_fast_hostile_devices_of_many_are_no_trouble(devices, fewest):
    """One in five of the devices, of 101 at most, has to be refused."""
    checks = Checks()
    for device in range(fewest):
        assert checks.trouble(devices) is None
        checks.reason_to_refuse(of(device), norm(1e6))
    assert checks.trouble(devices) is not None

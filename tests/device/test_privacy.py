"""Local differential privacy: the noise, the sensitivity it covers, and what is charged."""

from dataclasses import replace
from math import inf, pi, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from latecomer.core.messages import TrainSpec
from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.ledger import Ledger, Release
from latecomer.device.optimizers import initial_state, sgd
from latecomer.device.privacy import (
    Privacy,
    noise_rng,
    per_release_multiplier,
    poisson_plan,
    unit_noise,
)
from latecomer.device.training import Plan, local_update, plan_batches, task_rng
from latecomer.errors import BadInput

DRAWS = 1_000_000
MODEL = FlatModel(lambda: nn.Linear(2, 3), (2,), 3)
SPEC = TrainSpec(local_epochs=2, batch_size=4, lr=0.1, momentum=0.5)
GAUSSIAN = Privacy("gaussian", multiplier=1.5, clip=0.8, delta=1e-5)
LAPLACE = replace(GAUSSIAN, kind="laplace")
POISSON = replace(GAUSSIAN, sampling="poisson")
WHOLE = replace(GAUSSIAN, where="update")


def rng(number: int = 0) -> torch.Generator:
    return noise_rng(0, 0, number)


def assert_noise(noise: Tensor, kind: str, scale: float) -> None:
    """Standard deviation and mean size together tell the two kinds apart."""
    std, size = (scale, scale * sqrt(2 / pi)) if kind == "gaussian" else (sqrt(2) * scale, scale)
    assert noise.std().item() == pytest.approx(std, rel=0.01)
    assert noise.abs().mean().item() == pytest.approx(size, rel=0.01)
    assert noise.mean().item() == pytest.approx(0, abs=0.01 * std)


@pytest.mark.parametrize(
    ("epsilon", "kind", "multiplier"),
    [
        (1.0, "gaussian", 4.845),
        (0.5, "gaussian", 9.690),
        (inf, "gaussian", 0),
        (4, "laplace", 0.25),
    ],
)
def test_the_printed_calibration(epsilon: float, kind: str, multiplier: float) -> None:
    assert per_release_multiplier(epsilon, 1e-5, kind) == pytest.approx(multiplier, abs=5e-4)


@pytest.mark.parametrize("privacy", [GAUSSIAN, LAPLACE], ids=["gaussian", "laplace"])
def test_noise_of_a_step_is_measured_by_its_own_batch(privacy: Privacy) -> None:
    hook = privacy.on_gradient([4, 1], 5, SPEC, rng())
    gradient = torch.full((DRAWS,), 7.0)
    assert_noise(hook(gradient, 0) - 7, privacy.kind, 1.5 * 2 * 0.8 / 4)
    assert_noise(hook(gradient, 1) - 7, privacy.kind, 1.5 * 2 * 0.8)
    assert gradient.eq(7).all()


def test_noise_as_printed_is_charged_for_what_it_is() -> None:
    """Measured by all 10 examples, in batches of 4, 4 and 2: too little, and the ledger knows."""
    printed = replace(GAUSSIAN, denominator="dataset")
    assert printed.scales([4, 4, 2], 10, SPEC) == [pytest.approx(1.5 * 2 * 0.8 / 10)] * 3
    assert printed.release(10, SPEC).multiplier == pytest.approx(1.5 * 2 / 10)
    assert printed.release(8, SPEC).multiplier == pytest.approx(1.5 * 4 / 8)
    at_once = replace(SPEC, batch_size=10)
    assert printed.release(10, at_once) == GAUSSIAN.release(10, at_once)
    assert printed.scales([10], 10, at_once) == GAUSSIAN.scales([10], 10, at_once)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_noise_of_an_update_covers_the_whole_of_it(kind: str) -> None:
    privacy = replace(WHOLE, kind=kind)
    delta = torch.zeros(DRAWS)
    assert_noise(privacy.noised_update(delta, rng()), kind, 1.5 * 2 * 0.8)
    assert delta.eq(0).all()


def test_one_batch_of_everything_is_the_paper() -> None:
    epsilon, delta, clip, lr, n = 2.0, 1e-4, 1.5, 0.05, 20
    privacy = Privacy("gaussian", per_release_multiplier(epsilon, delta), clip, delta)
    spec = TrainSpec(local_epochs=1, batch_size=n, lr=lr, momentum=0.9)
    # sqrt(2 ln 12500) = 4.3436; sensitivity 0.05 * 2 * 1.5 / 20 = 0.0075
    assert privacy.noise_std(n, [n], spec) == pytest.approx(0.0075 * 4.3436 / 2, rel=1e-4)


def test_momentum_repeats_the_noise() -> None:
    privacy = replace(GAUSSIAN, multiplier=1.0, clip=1.0)  # scale 2 / b
    spec = replace(SPEC, lr=0.2, lr_scale=0.5)
    # 1 of the last step, 1 + 0.5 of the one before, 1 + 0.5 + 0.25 of the first
    expected = 0.1 * sqrt(2**2 + (0.5 * 1.5) ** 2 + (0.5 * 1.75) ** 2)
    assert privacy.noise_std(9, [4, 4, 1], spec) == pytest.approx(expected)
    assert privacy.noise_std(9, [4, 4, 1, 0], spec) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
@pytest.mark.parametrize("sampling", ["shuffle", "poisson"])
def test_noise_of_the_delta_is_what_training_makes_of_it(kind: str, sampling: str) -> None:
    privacy = replace(GAUSSIAN, kind=kind, sampling=sampling)
    sizes = [4, 4, 2, 4, 0, 2] if sampling == "poisson" else [4, 4, 2, 4, 4, 2]
    hook = privacy.on_gradient(sizes, 10, SPEC, rng())
    params = torch.zeros(DRAWS)
    memory = initial_state(params)
    for step in range(len(sizes)):
        noise = hook(torch.zeros(DRAWS), step)
        params, memory = sgd(params, noise, memory, SPEC, Tensor.add)
    assert params.std().item() == pytest.approx(privacy.noise_std(10, sizes, SPEC), rel=0.01)


def test_noise_of_an_update_is_as_it_was_added() -> None:
    adam = replace(SPEC, optimizer="adam")
    assert WHOLE.noise_std(10, [4, 4, 2], adam) == pytest.approx(1.5 * 2 * 0.8)
    laplace = replace(WHOLE, kind="laplace")
    assert laplace.noise_std(10, [4, 4, 2], SPEC) == pytest.approx(sqrt(2) * 1.5 * 2 * 0.8)
    assert GAUSSIAN.noise_std(10, [4, 4, 2], adam) == 0.0  # unknown


# What the noise must cover: clipped gradients, through the program that devices run.

examples = st.tuples(st.floats(-50, 50, width=32), st.floats(-50, 50, width=32))
labels = st.integers(0, 2)
clips = st.floats(0.01, 10)


def gradients(
    x: list[tuple[float, float]], y: list[int], clip: float, batch_size: int, scale: float = 1.0
) -> list[Tensor]:
    """What the hook is shown: the averages of clipped gradients, at large or small weights."""
    seen: list[Tensor] = []

    def keep(gradient: Tensor, step: int) -> Tensor:
        seen.append(gradient)
        return gradient

    spec = TrainSpec(local_epochs=1, batch_size=batch_size, lr=0.0, clip=clip)
    order = torch.arange(len(y)).view(-1, batch_size)
    plan = Plan(order, torch.ones(order.shape))
    params = scale * MODEL.init(0)
    local_update(MODEL, params, torch.tensor(x), torch.tensor(y), spec, plan, on_gradient=keep)
    return seen


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(examples, labels), min_size=1, max_size=5), clips, st.floats(0.1, 10))
def test_no_example_exceeds_the_clip(
    data: list[tuple[tuple[float, float], int]], clip: float, scale: float
) -> None:
    x, y = zip(*data, strict=True)
    for gradient in gradients(list(x), list(y), clip, batch_size=1, scale=scale):
        assert gradient.norm().item() <= clip * (1 + 1e-5)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(examples, labels), min_size=2, max_size=6),
    st.tuples(examples, labels),
    st.integers(0, 5),
    clips,
)
def test_one_example_moves_the_mean_no_further_than_the_noise_is_measured_by(
    data: list[tuple[tuple[float, float], int]],
    other: tuple[tuple[float, float], int],
    where: int,
    clip: float,
) -> None:
    b = len(data)
    neighbour = [*data]
    neighbour[where % b] = other
    (one,), (two,) = (
        gradients([x for x, _ in some], [y for _, y in some], clip, b) for some in (data, neighbour)
    )
    sensitivity = (one - two).norm().item()
    assert sensitivity <= 2 * clip / b * (1 + 1e-5)
    measured = Privacy("gaussian", 1.0, clip, 1e-5).scales([b], b, replace(SPEC, batch_size=b))
    assert measured == [pytest.approx(2 * clip / b)]


def test_the_sensitivity_is_reached() -> None:
    """Two examples that pull in opposite directions: a bound half as large would be wrong."""
    far = [(50.0, 0.0), (-50.0, 0.0)]
    one, two = (gradients([x, (1.0, 1.0)], [0, 1], 0.5, 2, scale=0.01)[0] for x in far)
    assert (one - two).norm().item() > 0.95 * 2 * 0.5 / 2


@pytest.mark.parametrize(("kind", "norm"), [("gaussian", 2), ("laplace", 1)])
def test_an_update_is_clipped_to_the_norm_of_its_noise(kind: str, norm: int) -> None:
    privacy = Privacy(kind, 0.0, 2.0, 1e-5, where="update")
    assert privacy.norm == norm
    long, short = torch.tensor([3.0, -4.0]), torch.tensor([0.3, -0.4])
    torch.testing.assert_close(
        privacy.noised_update(long, rng()), long * 2 / (5 if norm == 2 else 7)
    )
    assert privacy.noised_update(short, rng()).equal(short)
    assert privacy.noised_update(torch.zeros(2), rng()).equal(torch.zeros(2))


@pytest.mark.parametrize("bad", [inf, -inf, float("nan"), 1e30])
def test_a_diverged_update_does_not_show(bad: float) -> None:
    noised = WHOLE.noised_update(torch.tensor([1.0, bad]), rng())
    assert noised.equal(WHOLE.noised_update(torch.zeros(2), rng()))


def test_each_place_leaves_the_other_alone() -> None:
    delta = torch.tensor([30.0, 40.0])
    assert GAUSSIAN.noised_update(delta, rng()) is delta
    assert WHOLE.on_gradient([4, 4, 2], 10, SPEC, rng()) is None


def test_without_noise_and_clipping_it_is_plain_training() -> None:
    n = 10
    x, y = torch.randn(n, 2, generator=rng(7)), torch.arange(n) % 3
    off = Privacy("gaussian", 0.0, 1e6, 1e-5)
    plan = off.plan(n, SPEC, task_rng(0, 0, 0))
    assert plan.order.equal(plan_batches(n, SPEC, task_rng(0, 0, 0)).order)
    hook = off.on_gradient([4, 4, 2] * 2, n, SPEC, rng())
    spec = replace(SPEC, clip=off.clip)
    base = MODEL.init(0)
    private = local_update(MODEL, base, x, y, spec, plan, on_gradient=hook)
    torch.testing.assert_close(private, local_update(MODEL, base, x, y, SPEC, plan))


# Poisson sampling


def test_poisson_draws_every_example_at_its_rate_by_itself() -> None:
    n, spec = 7, replace(SPEC, local_epochs=5000, batch_size=3)
    plan = poisson_plan(n, spec, task_rng(0, 0, 0))
    assert len(plan.order) == 5000 * 3  # as many steps as shuffled batches of 3, 3 and 1
    assert plan.order.shape == plan.mask.shape
    assert plan.mask.dtype is torch.float32
    drawn = torch.zeros(len(plan.order), n)
    for row, order, mask in zip(drawn, plan.order, plan.mask, strict=True):
        count = int(mask.sum())
        assert mask[:count].all()  # the real ones come first
        assert len(set(order[:count].tolist())) == count
        assert order[count:].eq(0).all()
        row[order[:count]] = 1
    q = 3 / 7
    # 15,000 draws: the standard error of a rate is 0.004, of a correlation 0.008
    assert drawn.mean(0).sub(q).abs().max() < 0.02
    correlation = torch.corrcoef(drawn.T) - torch.eye(n)
    assert correlation.abs().max() < 0.04
    alone = drawn.sum(1).eq(0).float().mean().item()
    assert alone == pytest.approx((1 - q) ** n, abs=0.006)  # 0.0199: some steps are empty


def test_poisson_at_rate_1_takes_everything() -> None:
    plan = POISSON.plan(3, replace(SPEC, batch_size=8), task_rng(0, 0, 0))
    assert plan.order.tolist() == [[0, 1, 2]] * 2
    assert plan.mask.all()
    assert POISSON.release(3, replace(SPEC, batch_size=8)).rate == 1.0


def test_poisson_draws_hang_on_the_task_alone() -> None:
    one, two, other = (poisson_plan(50, SPEC, task_rng(0, 0, number)) for number in (1, 1, 2))
    assert one.order.equal(two.order)
    assert one.mask.equal(two.mask)
    assert one.mask.sum(1).tolist() != other.mask.sum(1).tolist()


def test_a_poisson_plan_is_at_least_one_wide() -> None:
    spec = TrainSpec(local_epochs=1, batch_size=1)
    widths = {poisson_plan(2, spec, task_rng(0, 0, i)).order.shape[1] for i in range(200)}
    assert widths == {1, 2}
    with pytest.raises(BadInput, match="at least one example"):
        poisson_plan(0, spec, task_rng(0, 0, 0))


def test_poisson_divides_the_sum_by_the_expected_number() -> None:
    hook = replace(POISSON, multiplier=0.0).on_gradient([2, 6, 0], 20, SPEC, rng())
    assert hook(torch.tensor([3.0, 1.0]), 0).tolist() == [1.5, 0.5]
    assert hook(torch.tensor([3.0, 1.0]), 1).tolist() == [4.5, 1.5]
    assert hook(torch.tensor([3.0, float("nan")]), 2).tolist() == [0.0, 0.0]


def test_poisson_gradients_are_right_on_average() -> None:
    n, spec = 12, replace(SPEC, local_epochs=4000)
    values = torch.randn(n, generator=rng(3))
    plan = poisson_plan(n, spec, task_rng(0, 0, 0))
    sizes = plan.mask.sum(1).int().tolist()
    hook = replace(POISSON, multiplier=0.0).on_gradient(sizes, n, spec, rng())
    means = (values[plan.order] * plan.mask).sum(1) / plan.mask.sum(1).clamp_min(1)
    steps = torch.stack([hook(mean, step) for step, mean in enumerate(means)])
    # one step's standard deviation is at most sqrt(sum v^2 (1/q - 1)) / n
    error = sqrt(values.square().sum().item() * 2) / n / sqrt(len(steps))
    assert steps.mean().item() == pytest.approx(values.mean().item(), abs=4 * error)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_an_empty_batch_is_noised_like_any(kind: str) -> None:
    hook = replace(POISSON, kind=kind).on_gradient([5, 0], 20, SPEC, rng())
    gradient = torch.zeros(DRAWS)
    for step in range(2):
        assert_noise(hook(gradient, step), kind, 1.5 * 0.8 / 4)


def test_the_padding_of_a_shuffled_plan_is_not_noised() -> None:
    hook = GAUSSIAN.on_gradient([4, 0], 4, SPEC, rng())
    assert hook(torch.zeros(3), 1).equal(torch.zeros(3))


# What is charged


@pytest.mark.parametrize(
    ("privacy", "rate", "releases"),
    [(GAUSSIAN, 1.0, 2), (LAPLACE, 1.0, 2), (WHOLE, 1.0, 1), (POISSON, 0.4, 6)],
)
def test_a_task_is_charged_as_the_place_and_the_sampling_say(
    privacy: Privacy, rate: float, releases: int
) -> None:
    ledger = Ledger()
    privacy.charge(ledger, 10, SPEC)
    assert ledger.history == ((Release(privacy.kind, 1.5, rate), releases),)
    assert privacy.releases(10, SPEC) == releases
    privacy.charge(ledger, 10, SPEC)
    assert ledger.history[0][1] == 2 * releases


def test_poisson_is_charged_for_every_step_it_plans() -> None:
    for n in (1, 3, 4, 5, 33):
        assert len(POISSON.plan(n, SPEC, task_rng(0, 0, n)).order) == POISSON.releases(n, SPEC)


@pytest.mark.parametrize("privacy", [GAUSSIAN, LAPLACE, POISSON, WHOLE])
def test_the_budget_is_never_exceeded_and_never_left_unused(privacy: Privacy) -> None:
    privacy = replace(privacy, multiplier=6.0, budget=2.0)
    ledger, tasks = Ledger(), 0
    while privacy.may_release(ledger, 40, SPEC):
        privacy.charge(ledger, 40, SPEC)
        tasks += 1
    assert tasks > 1
    assert ledger.epsilon(privacy.delta, privacy.accountant) <= 2.0
    privacy.charge(ledger, 40, SPEC)
    assert ledger.epsilon(privacy.delta, privacy.accountant) > 2.0


def test_no_budget_is_no_bound() -> None:
    ledger = Ledger([(Release("gaussian", 0.0), 1)])
    assert GAUSSIAN.may_release(ledger, 10, SPEC)
    assert not replace(GAUSSIAN, budget=1e9).may_release(ledger, 10, SPEC)


def test_an_infinite_epsilon_is_sent_as_a_number() -> None:
    ledger = Ledger([(Release("gaussian", 0.0), 1)])
    assert GAUSSIAN.epsilon(ledger) == 1e9
    assert GAUSSIAN.epsilon(Ledger()) == 0.0


@pytest.mark.parametrize(("privacy", "norm"), [(GAUSSIAN, 2), (LAPLACE, 1)])
def test_a_device_clips_whatever_the_task_asks_for(privacy: Privacy, norm: int) -> None:
    enforced = privacy.enforced(replace(SPEC, clip=1e6))
    assert (enforced.clip, enforced.clip_norm) == (0.8, norm)
    assert replace(privacy, where="update").enforced(SPEC) is SPEC


# Streams


def test_noise_belongs_to_one_task() -> None:
    def noise(*names: int) -> tuple[float, ...]:
        hook = GAUSSIAN.on_gradient([4, 2], 6, SPEC, noise_rng(*names))
        steps = [hook(torch.zeros(5), step) for step in range(2)]
        return tuple(torch.cat(steps).tolist())

    names = [(s, d, t) for s in range(2) for d in range(3) for t in range(3)]
    draws = {noise(*name) for name in names}
    assert len(draws) == len(names)
    assert {noise(*name) for name in names} == draws


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_noise_is_apart_from_the_batches(kind: str) -> None:
    like = torch.empty(100)
    own, batches = unit_noise(kind, like, rng()), unit_noise(kind, like, task_rng(0, 0, 0))
    assert unit_noise(kind, like, rng()).equal(own)
    assert not own.eq(batches).any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clip": 0.0}, "clip"),
        ({"clip": inf}, "clip"),
        ({"multiplier": inf}, "multiplier"),
        ({"multiplier": -1.0}, "multiplier"),
        ({"delta": 1.0}, "delta"),
        ({"budget": -1.0}, "budget"),
        ({"where": "update", "sampling": "poisson"}, "shuffle"),
        ({"denominator": "dataset", "sampling": "poisson"}, "denominator"),
        ({"denominator": "dataset", "where": "update"}, "denominator"),
    ],
)
def test_nonsense_is_refused(wrong: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        replace(GAUSSIAN, **wrong)


def test_epsilon_0_is_refused() -> None:
    with pytest.raises(BadInput, match="above 0"):
        per_release_multiplier(0.0, 1e-5)


@pytest.mark.parametrize("network", ["mlp", "lenet"])
def test_an_example_that_overflows_leaves_no_trace(network):
    """Else a delta that is not finite would tell of it without any noise."""
    model = flat_model(network, (1, 8, 8), 3)
    x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    y = torch.arange(8) % 3
    spec = TrainSpec(local_epochs=1, batch_size=8, clip=1.0)
    rest = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    seen = []

    def capture(gradient, step):
        seen.append(gradient)
        return gradient

    plan = Plan(torch.arange(8).unsqueeze(0), torch.ones(1, 8))
    wild = x.clone()
    wild[7] = 3e38
    local_update(model, model.init(0), wild, y, spec, plan, capture)
    part = Plan(rest.unsqueeze(0), torch.ones(1, 7))
    local_update(model, model.init(0), x, y, spec, part, capture)
    assert torch.allclose(seen[0] * 8, seen[1] * 7, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "variance", "tail"), [("gaussian", 1.0, 0.3173), ("laplace", 2.0, 0.3679)]
)
def test_noise_of_the_operating_system_has_the_same_distribution(kind, variance, tail):
    """Mean, variance, P(|x| > 1), and no correlation of neighbours; each within 5 deviations."""
    like = torch.empty(400, 500)
    noise = unit_noise(kind, like, None)
    assert (noise.shape, noise.dtype) == (like.shape, torch.float32)
    flat, n = noise.flatten().double(), like.numel()
    assert flat.mean().abs() < 5 * (variance / n) ** 0.5
    assert flat.var().item() == pytest.approx(variance, rel=0.03)
    assert (flat.abs() > 1).double().mean().item() == pytest.approx(tail, abs=0.006)
    assert torch.corrcoef(torch.stack([flat[:-1], flat[1:]]))[0, 1].abs() < 0.012
    assert not torch.equal(noise, unit_noise(kind, like, None))

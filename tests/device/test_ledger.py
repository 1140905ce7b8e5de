"""The ledger against dp_accounting's own composition, closed forms and hand-worked numbers."""

import subprocess
import sys
from math import exp, inf, log, log1p, nextafter, sqrt
from statistics import NormalDist

import dp_accounting as dp
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st

from latecomer.device.ledger import KINDS, Ledger, Release, composed_epsilon, multiplier_for
from latecomer.errors import BadInput

DELTA = 1e-5
NOMINAL = sqrt(2 * log(1.25 / DELTA))  # Eq. 25 with epsilon = 1
SAMPLED = Release("gaussian", 1.2, 0.2)


def alone(release: Release, count: int = 1, delta: float = DELTA, accountant="pld") -> float:
    return composed_epsilon(((release, count),), delta, accountant)


@pytest.mark.parametrize(
    ("accountant", "releases", "epsilon", "tolerance"),
    [
        ("pld", 40, 5.98, 0.01),
        ("pld", 200, 16.1, 0.05),
        ("rdp", 40, 6.44, 0.01),
        ("rdp", 200, 17.2, 0.05),
    ],
)
def test_composed_epsilon_of_releases_of_nominal_epsilon_1(
    accountant: str, releases: int, epsilon: float, tolerance: float
) -> None:
    ledger = Ledger()
    for _ in range(releases):
        ledger.charge(Release("gaussian", NOMINAL))
    assert ledger.epsilon(DELTA, accountant) == pytest.approx(epsilon, abs=tolerance)


def directly(event: dp.DpEvent, accountant: str, delta: float = DELTA) -> float:
    made = PLDAccountant() if accountant == "pld" else RdpAccountant()
    return float(made.compose(event).get_epsilon(delta))


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("release", "event"),
    [
        (Release("gaussian", 3.0), dp.GaussianDpEvent(3.0)),
        (Release("laplace", 5.0), dp.LaplaceDpEvent(5.0)),
        (SAMPLED, dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(1.2))),
    ],
)
def test_epsilon_of_k_releases_is_that_of_the_chosen_accountant(
    release: Release, event: dp.DpEvent, accountant: str
) -> None:
    """Epsilon by PLD may be above dp_accounting's by its coarser discretisation: at most 0.1%."""
    ledger, before = Ledger(), 0.0
    for releases in (1, 5):
        while sum(count for _, count in ledger.history) < releases:
            ledger.charge(release)
        found = ledger.epsilon(DELTA, accountant)
        expected = directly(dp.SelfComposedDpEvent(event, releases), accountant)
        assert found == pytest.approx(expected, rel=1e-3 if accountant == "pld" else 1e-9)
        assert found > before
        before = found
    assert ledger.epsilon(1e-3, accountant) < before


def test_gaussian_releases_compose_to_one_gaussian() -> None:
    """1 / 3^2 + 1 / 4^2 = 1 / 2.4^2, and 1 / 10^2 + 3 / 10^2 = 1 / 5^2."""
    mixed = Ledger([(Release("gaussian", 3.0), 1), (Release("gaussian", 4.0), 1)])
    for accountant in ("pld", "rdp"):
        expected = alone(Release("gaussian", 2.4), accountant=accountant)
        assert mixed.epsilon(DELTA, accountant) == pytest.approx(expected, rel=1e-9)
        expected = alone(Release("gaussian", 5.0), accountant=accountant)
        four = alone(Release("gaussian", 10.0), 4, accountant=accountant)
        assert four == pytest.approx(expected, rel=1e-9)
    assert mixed.epsilon(DELTA, "pld") == pytest.approx(dp.get_epsilon_gaussian(2.4, DELTA))


def test_releases_that_cost_nothing_leave_the_others_as_they_are() -> None:
    one = ((Release("laplace", 3.0), 2),)
    free = ((Release("gaussian", inf), 3), (Release("gaussian", 0.0), 0))
    for accountant in ("pld", "rdp"):
        assert composed_epsilon((*free, *one), DELTA, accountant) == composed_epsilon(
            one, DELTA, accountant
        )


GAUSSIANS = [
    dp.SelfComposedDpEvent(dp.GaussianDpEvent(4.0), 7),
    dp.GaussianDpEvent(2.0),
    dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(1.2)), 10),
]
HISTORY = [(Release("gaussian", 4.0), 7), (Release("gaussian", 2.0), 1), (SAMPLED, 10)]
LAPLACE = (Release("laplace", 3.0), 2)


def test_epsilon_of_a_mixed_history_is_that_of_dp_accounting() -> None:
    events = [*GAUSSIANS, dp.SelfComposedDpEvent(dp.LaplaceDpEvent(3.0), 2)]
    ledger = Ledger([*HISTORY, LAPLACE])
    by_rdp = RdpAccountant().compose(dp.ComposedDpEvent(events)).get_epsilon(DELTA)
    assert ledger.epsilon(DELTA, "rdp") == pytest.approx(by_rdp, rel=1e-9)

    events.append(dp.PoissonSampledDpEvent(0.5, dp.LaplaceDpEvent(2.5)))
    ledger.charge(Release("laplace", 2.5, 0.5))
    by_pld = PLDAccountant().compose(dp.ComposedDpEvent(events)).get_epsilon(DELTA)
    found = ledger.epsilon(DELTA, "pld")
    assert by_pld <= found <= by_pld * (1 + 5e-4)
    assert found < by_rdp


def test_epsilon_of_gaussian_noise_by_the_closed_form() -> None:
    z = 1.7
    epsilon = alone(Release("gaussian", z))
    cdf = NormalDist().cdf
    delta = cdf(1 / (2 * z) - epsilon * z) - exp(epsilon) * cdf(-1 / (2 * z) - epsilon * z)
    assert delta == pytest.approx(DELTA, rel=1e-6)
    # The exact figure, where dp_accounting's grid may only err upwards.
    by_grid = PLDAccountant().compose(dp.GaussianDpEvent(z)).get_epsilon(DELTA)
    assert by_grid * (1 - 1e-6) <= epsilon <= by_grid


def test_the_sensitivity_is_not_doubled_again() -> None:
    """dp_accounting takes a multiplier under REPLACE_ONE for that of adding or removing."""
    doubled = PLDAccountant(dp.NeighboringRelation.REPLACE_ONE)
    by_doubling = doubled.compose(dp.GaussianDpEvent(4.0)).get_epsilon(DELTA)
    assert by_doubling == pytest.approx(alone(Release("gaussian", 2.0)), rel=1e-4)


def test_epsilon_of_laplace_noise_by_the_closed_form() -> None:
    exact = 0.5 + 2 * log1p(-0.01)
    assert exact <= alone(Release("laplace", 2.0), delta=0.01) <= exact * (1 + 1e-4)


@pytest.mark.parametrize("rate", [0.01, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_sampling_amplifies_by_the_theorem(kind: str, rate: float) -> None:
    """One release of (e, d) is of (log(1 + q(e^e - 1)), q d). Balle et al. 2018, Theorem 8."""
    whole = alone(Release(kind, 1.0), delta=1e-4)
    sampled = alone(Release(kind, 1.0, rate), delta=rate * 1e-4)
    exact = log1p(rate * (exp(whole) - 1))
    assert exact * (1 - 1e-6) <= sampled <= exact * (1 + 1e-3)


def test_sampled_releases_cost_less_than_whole_ones() -> None:
    for accountant in ("pld", "rdp"):
        whole = alone(Release("gaussian", 1.2), 50, accountant=accountant)
        assert alone(SAMPLED, 50, accountant=accountant) < whole / 3


def test_nothing_released_is_nothing_spent() -> None:
    ledger = Ledger()
    assert ledger.epsilon(DELTA, "pld") == ledger.epsilon(DELTA, "rdp") == 0.0
    ledger.charge(SAMPLED, 0)
    assert ledger.history == ()


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_epsilon_without_noise_is_infinite_and_with_infinite_noise_zero(
    kind: str, accountant: str
) -> None:
    free = Ledger([(Release(kind, inf), 5)])
    assert free.epsilon(DELTA, accountant) == 0.0
    free.charge(Release(kind, 0.0))
    assert free.epsilon(DELTA, accountant) == inf


def test_would_spend_does_not_change_the_ledger() -> None:
    ledger = Ledger(HISTORY)
    asked = ledger.would_spend(SAMPLED, 5, DELTA, "rdp")
    assert ledger.history == Ledger(HISTORY).history
    ledger.charge(SAMPLED, 5)
    assert ledger.epsilon(DELTA, "rdp") == asked


def test_devices_that_released_the_same_are_accounted_once() -> None:
    one, other = Ledger(HISTORY), Ledger()
    for release, count in reversed(HISTORY):
        for _ in range(count):
            other.charge(release)
    assert one.history == other.history
    one.epsilon(1e-6, "pld")
    before = composed_epsilon.cache_info().misses
    other.epsilon(1e-6, "pld")
    assert composed_epsilon.cache_info().misses == before


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="taken back"):
        Ledger().charge(SAMPLED, -1)


@pytest.mark.parametrize(
    "release",
    [Release("gaussian", NOMINAL), Release("gaussian", 2.0, 0.1), Release("laplace", 10.0)],
)
@pytest.mark.parametrize("step", [1, 7])
def test_a_budget_ends_where_the_next_release_exceeds_it(release: Release, step: int) -> None:
    budget, ledger, misses = 3.0, Ledger(), composed_epsilon.cache_info().misses
    while ledger.affords(release, step, budget, DELTA, "pld"):
        ledger.charge(release, step)
        assert ledger.history[0][1] < 10_000
    assert composed_epsilon.cache_info().misses - misses < 25
    assert ledger.epsilon(DELTA, "pld") <= budget
    assert ledger.would_spend(release, step, DELTA, "pld") > budget


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_a_budget_of_exactly_the_epsilon_is_enough(
    before: int, count: int, accountant: str
) -> None:
    """At and beside powers of two, up to which counts are rounded."""
    release = Release("gaussian", NOMINAL)
    ledger = Ledger([(release, before)])
    budget = ledger.would_spend(release, count, DELTA, accountant)
    assert budget == alone(release, before + count, accountant=accountant)
    assert ledger.affords(release, count, budget, DELTA, accountant)
    assert not ledger.affords(release, count, nextafter(budget, 0), DELTA, accountant)
    assert not ledger.affords(release, count + 1, budget, DELTA, accountant)


def test_a_mixed_ledger_affords_exactly_its_epsilon() -> None:
    ledger = Ledger(HISTORY)
    budget = ledger.would_spend(SAMPLED, 3, DELTA, "rdp")
    assert ledger.affords(SAMPLED, 3, budget, DELTA, "rdp")
    assert not ledger.affords(SAMPLED, 3, nextafter(budget, 0), DELTA, "rdp")


def test_no_release_is_always_affordable() -> None:
    assert Ledger().affords(SAMPLED, 0, 1e-9, DELTA, "rdp")
    assert not Ledger().affords(SAMPLED, 1, 1e-9, DELTA, "rdp")


def test_earlier_releases_of_another_kind_count_towards_the_budget() -> None:
    release, budget = Release("gaussian", NOMINAL), 3.0
    ledger = Ledger([(release, 10)])
    assert ledger.affords(release, 1, budget, DELTA, "pld")
    ledger.charge(Release("gaussian", 1.0))
    assert not ledger.affords(release, 1, budget, DELTA, "pld")
    exact = ledger.would_spend(release, 1, DELTA, "pld")
    assert ledger.affords(release, 1, exact, DELTA, "pld")  # a budget may be spent to the end
    assert not ledger.affords(release, 1, nextafter(exact, 0.0), DELTA, "pld")


@given(
    st.dictionaries(
        st.builds(
            Release,
            st.sampled_from(KINDS),
            st.floats(0, 1e6),
            st.floats(0, 1, exclude_min=True),
        ),
        st.integers(1, 2**53),
        max_size=5,
    )
)
def test_a_ledger_survives_as_a_tensor(counts: dict[Release, int]) -> None:
    rows = Ledger(counts.items()).to_tensor()
    assert rows.shape == (len(counts), 5)
    assert rows.dtype is torch.float64
    assert dict(Ledger.from_tensor(rows).history) == counts


def test_the_rows_of_a_ledger() -> None:
    rows = Ledger([(Release("laplace", 3.0), 2), (SAMPLED, 10)], "step").to_tensor()
    assert rows.tolist() == [[2.0, 0.0, 1.2, 0.2, 10.0], [2.0, 1.0, 3.0, 1.0, 2.0]]
    assert Ledger.from_tensor(rows).unit == "step"
    assert Ledger.from_tensor(Ledger().to_tensor()).unit == ""


def test_an_account_has_one_unit() -> None:
    ledger = Ledger()
    ledger.use("step")
    ledger.use("step")
    for other in ("update", "sampled step"):
        with pytest.raises(BadInput, match=f"of unit 'step'.* of unit '{other}'"):
            ledger.use(other)


CALIBRATED = [
    ("gaussian", 1.0, 200, "pld"),
    ("gaussian", 1.0, 200, "rdp"),
    ("gaussian", 0.05, 500, "pld"),
    ("gaussian", 0.05, 500, "rdp"),
    ("laplace", 1.0, 30, "pld"),
    ("laplace", 1.0, 30, "rdp"),
    ("laplace", 0.2, 30, "pld"),
]


# A small epsilon for whole releases, a large one for sampled ones; the other pairs are slow.
@pytest.mark.parametrize(
    ("kind", "rate", "releases", "accountant", "epsilon"),
    [
        pytest.param(
            *case, epsilon, marks=[pytest.mark.slow] if (case[1] < 1) == (epsilon < 1) else []
        )
        for case in CALIBRATED
        for epsilon in (0.5, 8.0)
    ],
)
def test_a_calibrated_run_spends_its_epsilon_and_no_more(
    kind: str, rate: float, releases: int, accountant: str, epsilon: float
) -> None:
    z = multiplier_for(epsilon, DELTA, kind, rate, releases, accountant)
    assert alone(Release(kind, z, rate), releases, accountant=accountant) <= epsilon
    less = Release(kind, z / 1.0002, rate)
    assert alone(less, releases, accountant=accountant) > epsilon


@pytest.mark.parametrize("multiplier", [0.3, 4.845, 60.0])
def test_calibration_finds_the_multiplier_again(multiplier: float) -> None:
    for release in (Release("gaussian", multiplier), Release("gaussian", multiplier, 0.1)):
        epsilon = alone(release, 40)
        found = multiplier_for(epsilon, DELTA, "gaussian", release.rate, 40, "pld")
        assert found == pytest.approx(multiplier, rel=1e-4)


def test_an_epsilon_that_is_met_exactly_needs_no_more_noise() -> None:
    epsilon = alone(Release("gaussian", 1.0), 4)
    assert multiplier_for(epsilon, DELTA, "gaussian", 1.0, 4, "pld") == 1.0


def test_more_noise_for_less_epsilon_more_releases_and_a_higher_rate() -> None:
    def needed(epsilon: float = 2.0, rate: float = 0.1, releases: int = 100) -> float:
        return multiplier_for(epsilon, DELTA, "gaussian", rate, releases, "pld")

    assert needed(epsilon=1.0) > needed()
    assert needed(releases=200) > needed()
    assert needed(rate=1.0) > needed(rate=0.2) > needed()


def test_epsilon_without_end_needs_no_noise() -> None:
    assert multiplier_for(inf, DELTA, "gaussian", 1.0, 10, "pld") == 0.0


def test_rdp_refuses_sampled_laplace_noise() -> None:
    with pytest.raises(BadInput, match="use accountant = 'pld'"):
        alone(Release("laplace", 1.0, 0.5), accountant="rdp")


def test_rdp_does_not_chatter(caplog: pytest.LogCaptureFixture) -> None:
    assert alone(Release("gaussian", 0.61, 0.5), 7, accountant="rdp") > 0
    assert not caplog.records


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Release("cauchy", 1.0), "gaussian, laplace"),
        (lambda: Release("gaussian", -1.0), "0 or more"),
        (lambda: Release("gaussian", float("nan")), "0 or more"),
        (lambda: Release("gaussian", 1.0, 0.0), "above 0, at most 1"),
        (lambda: Release("gaussian", 1.0, 1.1), "above 0, at most 1"),
        (lambda: alone(SAMPLED, accountant="moments"), "pld, rdp"),
        (lambda: alone(SAMPLED, delta=0.0), "above 0 and below 1"),
        (lambda: alone(SAMPLED, delta=1.0), "above 0 and below 1"),
        (lambda: multiplier_for(-1.0, DELTA, "gaussian", 1.0, 1, "pld"), "above 0"),
        (lambda: multiplier_for(0.0, DELTA, "gaussian", 1.0, 1, "pld"), "above 0"),
        (lambda: multiplier_for(1.0, DELTA, "gaussian", 1.0, 0, "pld"), "1 or more"),
    ],
)
def test_nonsense_is_refused(wrong, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        wrong()


def test_importing_the_ledger_does_not_import_the_accountant() -> None:
    code = (
        "import sys, latecomer.device.privacy, latecomer.device.ledger as ledger\n"
        "ledger.Ledger([(ledger.Release('gaussian', 1.0), 1)]).to_tensor()\n"
        "assert not {'dp_accounting', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

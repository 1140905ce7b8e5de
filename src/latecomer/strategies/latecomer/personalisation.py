"""Which model is deployed, and how each device personalises it (`device.personalisation`)."""

from collections.abc import Iterable, Sequence
from statistics import median

from torch import Tensor

from latecomer.core.messages import Contribution, ServingSettings
from latecomer.core.strategy import Action, Observer, ServerView
WEIGHT_CAP=10.0
from latecomer.strategies.latecomer.calibration import MIN_ARRIVALS, Calibration, network_of
from latecomer.strategies.latecomer.model_averaging import ModelAveraging
from latecomer.strategies.parts.switch_off import switch_note

# Dispersion of the devices' error rates (1: by chance): interpolation begins at the second and ends
# below the first.
SIMILAR, DIFFERENT = 1.5, 2.5


class Personalisation(Observer):
    """Observer: the deployed parameters, and the settings with which devices personalise them.

    A device adds up to `interpolation` of its last local update to the model and corrects its
    outputs for its class prior with strength `prior_correction`. Interpolation is 0 until the error
    rates that devices report differ by more than chance. The deployed model is the averaged one
    (`averaging`) with a calibrated output bias (`calibration`). A simulation evaluates with the
    local updates kept here; a deployed device uses its own copy.
    """

    kept = ("_updates", "_examples", "_since", "_differ")

    def __init__(
        self,
        interpolation: float,
        prior_correction: float,
        calibration: Calibration | None,
        averaging: ModelAveraging | None,
    ) -> None:
        self.prior_correction = prior_correction
        self._interpolation = interpolation
        self._calibration, self._averaging = calibration, averaging
        self._updates: dict[int, tuple[int, Tensor]] = {}  # device -> number of its task, delta
        self._examples: dict[int, int] = {}  # by device
        self._since, self._differ = 0, False
        self._settings: dict[str, tuple[int, ServingSettings]] = {}  # by lineage, as of a commit

    @property
    def interpolation(self) -> float:
        return self._interpolation if self._differ else 0.0

    def on_contribution(self, contribution: Contribution, view: ServerView) -> None:
        task, update = contribution.task, contribution.update
        self._since += 1
        self._examples[task.device] = update.num_examples
        newest, _ = self._updates.get(task.device, (-1, None))
        # A compensated update may arrive after a newer one; a private one is not kept.
        private = update.noise_std or update.epsilon
        if (
            self._interpolation
            and update.delta is not None
            and not private
            and task.number > newest
        ):
            self._updates[task.device] = (task.number, update.delta)

    def local_update(self, device: int) -> Tensor | None:
        return self._updates[device][1] if device in self._updates else None

    def class_prior(self, devices: Sequence[int], classes: int) -> Tensor | None:
        return self._calibration.class_prior(devices, classes) if self._calibration else None

    def deployed(self, lineage: str, view: ServerView) -> Tensor:
        head = view.store.head_params(lineage)
        params = self._averaging.average(lineage, head) if self._averaging else head
        return self._calibrated(params, lineage, view)

    def on_devices(self, lineage: str, view: ServerView) -> Tensor:
        return self._calibrated(view.store.head_params(lineage), lineage, view)

    def _calibrated(self, params: Tensor, lineage: str, view: ServerView) -> Tensor:
        return self._calibration.calibrated(params, lineage, view) if self._calibration else params

    def settings(self, lineage: str, view: ServerView) -> ServingSettings:
        # Every task asks for them, and they take a pass over all devices.
        known = self._settings.get(lineage)
        if known is None or known[0] != view.store.commits:
            known = self._settings[lineage] = (view.store.commits, self._made(lineage, view))
        return known[1]

    def _made(self, lineage: str, view: ServerView) -> ServingSettings:
        network = network_of(view)
        shift = self._calibration.shift(lineage, view) if self._calibration else None
        here = [device for device in self._examples if view.lineage_of(device) == lineage]
        prior = self.class_prior(here, network.num_classes if network else 0)
        return ServingSettings(
            float(self.interpolation),
            float(self.prior_correction),
            () if prior is None else tuple(prior.tolist()),
            () if shift is None else tuple(shift.tolist()),
        )

    def act(self, view: ServerView) -> Iterable[Action]:
        """Decide once per fleet pass about interpolation; a log line if that changes."""
        if self._since < max(MIN_ARRIVALS, len(self._examples)):
            return
        self._since = 0
        reports = self._calibration.clustering if self._calibration else None
        errors = reports.errors(self._examples) if reports and self._interpolation else {}
        if len(errors) < 2:
            return
        spread = dispersion([(error, self._examples[d]) for d, error in errors.items()])
        if self._differ == (spread >= (SIMILAR if self._differ else DIFFERENT)):
            return
        self._differ = not self._differ
        what = "differ: interpolation begins" if self._differ else "are similar: interpolation ends"
        reason = f"devices {what}; their error rates vary {spread:.1f} times as much as by chance"
        yield switch_note(reason, view.store.commits)


def dispersion(errors: Sequence[tuple[float, float]]) -> float:
    """Variance of error rates, each over n examples, relative to chance; 0 if all are 0.

    `errors` are (rate, n); n is cut at ten times its median.
    """
    limit = WEIGHT_CAP * median(n for _, n in errors)
    errors = [(e, min(n, limit)) for e, n in errors]
    total = sum(n for _, n in errors)
    mean = sum(e * n for e, n in errors) / total
    by_chance = mean * (1 - mean) * (len(errors) - 1)
    return sum(n * (e - mean) ** 2 for e, n in errors) / by_chance if by_chance > 0 else 0.0

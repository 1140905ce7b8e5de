"""Evaluation of a server's models by a Flower app: centrally, or on its devices."""

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from latecomer.core.server import Server
from latecomer.device.memory import DeviceMemory
from latecomer.study.app_scenario import AppScenario, column_of
from latecomer.study.metrics import LocalScores, Scores, over_devices


class AppEvaluator:
    """Computes the scores of a server's models with the functions of an app.

    Evaluation on devices calls the app's evaluate function on every device with the model of its
    lineage; results are kept until the next version.
    """

    def __init__(self, app: AppScenario, late: Collection[int]) -> None:
        self.app, self.late = app, late
        # The tensors that a device keeps between its tasks; set by the run.
        self.memory_of: Callable[[int], Mapping[str, Tensor]] = lambda device: {}
        self._kept: tuple[tuple[int, int], dict[int, tuple[dict[str, float], int]]] | None = None

    def central(self, server: Server, time: float = 0.0) -> Scores:
        """The scores of the ServerApp's evaluate_fn, or else the mean over devices.

        The mean is weighted by the examples that devices report, as Flower's strategies do.
        """
        found = self.app.central(server.model(), server.unaveraged, server.store.commits)
        if not found:
            each = list(self._on_devices(server).values())
            weights = [max(examples, 0) for _, examples in each]
            weights = weights if sum(weights) else [1] * len(each)
            names = each[0][0] if each else {}
            found = {
                name: sum(w * m[name] for (m, _), w in zip(each, weights, strict=True))
                / sum(weights)
                for name in names
                if all(name in m for m, _ in each)
            }
        values = {column_of(name): float(value) for name, value in found.items()}
        return Scores({name: values.get(name) for name in self.app.scoring.names})

    def validation(self, server: Server, time: float = 0.0) -> Scores:
        raise NotImplementedError("an app has no validation parts")

    def local_test(self, server: Server, time: float = 0.0) -> LocalScores:
        """The scores of the app's evaluate function on each device."""
        scoring = self.app.scoring
        found: dict[int, Scores] = {}
        if scoring.local:
            for device, (metrics, _) in self._on_devices(server).items():
                named = {column_of(name): value for name, value in metrics.items()}
                found[device] = Scores({scoring.main: named.get(scoring.local)})
        return over_devices(found, self.late, scoring.main, scoring.lower_is_better)

    def _on_devices(self, server: Server) -> dict[int, tuple[dict[str, float], int]]:
        """Metrics and examples of every device."""
        at = (server.store.commits, server.accepted)
        if self._kept is None or self._kept[0] != at:
            self._kept = (at, {device: self._on(device, server) for device in self.app.clients})
        return self._kept[1]

    def _on(self, device: int, server: Server) -> tuple[dict[str, float], int]:
        memory: DeviceMemory = dict(self.memory_of(device))
        vector = server.model(server.lineage_of(device))
        version = server.store.commits
        return self.app.clients[device].evaluate(vector, server.unaveraged, version, memory)

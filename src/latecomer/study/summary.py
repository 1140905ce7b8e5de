"""summary.json: the result of a run as nested scalars."""

from dataclasses import asdict
from statistics import fmean
from typing import Any

from latecomer.core.params import digest
from latecomer.core.server import Server
from latecomer.engines.virtual import VirtualEngine
from latecomer.study.experiment import Experiment
from latecomer.study.metrics import LocalScores, Scores
from latecomer.study.totals import RunTotals


def summary_of(
    experiment: Experiment,
    server: Server,
    engine: VirtualEngine,
    totals: RunTotals,
    central: Scores,
    local: LocalScores,
    wall_seconds: float,
) -> dict[str, Any]:
    """Everything that is known when a run ends, except why it ended."""
    config = experiment.config
    return {
        "strategy": experiment.recipe.name,
        "source": experiment.source_name,
        "model": experiment.model_name,
        "devices": len(experiment.federation.clients),
        "seed": config.seed,
        "updates": server.accepted,
        "versions": server.store.commits,
        "virtual_seconds": round(engine.now, 6),
        "wall_seconds": round(wall_seconds, 3),
        **central.values,
        **({"f1": f1_by_class(experiment, central)} if central.f1 else {}),
        "staleness": totals.staleness,
        "bytes": _bytes(engine),
        "epsilon": _epsilon(experiment, totals),
        "compensation": totals.compensation if server.strategy.compensates_later else None,
        "clusters": _clusters(experiment, server, totals),
        f"client_{local.metric}": {
            "mean": local.mean,
            "worst": local.worst,
            "late_mean": local.late_mean,
        },
        "model_hash": digest(server.model(name) for name in used_lineages(experiment, server)),
        **{f"client_{name}": asdict(over) for name, over in local.further.items()},
        "worst_client": local.worst_device,
        "refused": totals.refused,
        "dropped": totals.dropped,
        "quarantines": totals.quarantines,
        "rollbacks": totals.rollbacks,
        "late_devices": sorted(experiment.fleet.late),
        "cluster_members": _members(server),
        "notes": list(experiment.notes),
        "warnings": _warnings(server, totals),
        **objective_summary(experiment),
    }


def objective_summary(experiment: Experiment) -> dict[str, Any]:
    """Loss, kind of targets and metrics, unless these are the usual ones of a classification."""
    scoring, objective = experiment.scoring, experiment.scoring.objective
    metrics = {"metrics": list(scoring.columns)}
    if objective.classifies:
        return metrics if scoring.extra else {}
    about = {"loss": objective.loss, "kind": objective.kind, "metric": scoring.main}
    return {"objective": {**about, "lower_is_better": scoring.lower_is_better}, **metrics}


def f1_by_class(experiment: Experiment, found: Scores) -> dict[str, float | None]:
    """F1 by name of the class or label; empty for other kinds of targets."""
    return dict(zip(experiment.label_names, found.f1, strict=True)) if found.f1 else {}


def used_lineages(experiment: Experiment, server: Server) -> list[str]:
    """The lineages that devices are assigned to, in alphabetical order."""
    devices = range(len(experiment.federation.clients))
    return sorted({server.lineage_of(device) for device in devices})


def _bytes(engine: VirtualEngine) -> dict[str, int]:
    found = {"up": engine.bytes_up, "down": engine.bytes_down}
    return {**found, "saved": engine.bytes_saved} if engine.bytes_saved else found


def _epsilon(experiment: Experiment, totals: RunTotals) -> dict[str, float] | None:
    """Epsilon spent by the devices' ledgers; 0 for a device that has released nothing."""
    if not experiment.config.privacy.epsilon:
        return None
    values = [totals.epsilon.get(device, 0.0) for device in experiment.clients]
    return {"mean": fmean(values), "max": max(values), "retired": totals.retired}


def _members(server: Server) -> list[dict[str, Any]] | None:
    if not server.strategy.personal:
        return None
    return [{"lineage": name, "devices": devices} for name, devices in server.clusters().items()]


def _clusters(experiment: Experiment, server: Server, totals: RunTotals) -> dict[str, int] | None:
    if not server.strategy.personal:
        return None
    used = {server.lineage_of(device) for device in experiment.clients}
    return {
        "final": len(used),
        "splits": totals.splits,
        "merges": totals.merges,
        "broadcasts": totals.broadcasts,
    }


def _warnings(server: Server, totals: RunTotals) -> list[str]:
    found = []
    if totals.rollbacks:
        found.append(
            f"the model was rolled back {totals.rollbacks} times, at last because"
            f" {totals.last_rollback}; if that goes on, try a smaller training.lr"
        )
    if totals.refused <= server.accepted:
        return found
    return [
        *found,
        f"{totals.refused} updates were refused and only {server.accepted} accepted; the last"
        f" reason: {totals.last_failure}. Does training diverge? Try a smaller training.lr",
    ]

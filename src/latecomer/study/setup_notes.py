"""Remarks on how an experiment is set up, shown before a run and kept in summary.json."""

from collections.abc import Iterable

from latecomer.core.messages import TrainSpec
from latecomer.core.strategy import Strategy
from latecomer.strategies.recipe import Recipe
from latecomer.study.config import Config


def setup_notes(
    config: Config, recipe: Recipe, strategy: Strategy, spec: TrainSpec
) -> Iterable[str]:
    """One sentence for each combination of settings whose effect a user may not expect."""
    name, program = recipe.name, strategy.prepare(spec)
    if config.data.drift.kind != "none" and config.data.test == "official":
        yield "data.drift: the official test rows belong to no device and do not change"
    if config.data.subject and config.data.partition != "by-subject":
        yield (
            f"data.subject = {config.data.subject!r} has no effect on the devices; for one device"
            " per subject set data.partition = 'by-subject'"
        )
    if strategy.inverts and spec.optimizer != "sgd":
        yield (
            f"{name} with training.optimizer = {spec.optimizer!r}: inversion through it is"
            " inaccurate; compensation ends if its errors are larger than without; prefer sgd"
        )
    late = config.fleet.late
    if late.only and not late.delay:
        yield "fleet.late.only with a fleet.late.delay of 0: no device is late, except by its speed"
    attack = config.attack
    if (attack.kind != "none") != (attack.devices > 0):
        yield (
            f"attack.kind = {attack.kind!r} with attack.devices = {attack.devices:g}: no device is"
            " hostile; set both"
        )
    elif attack.devices and recipe.pooled:
        yield f"{name} pools all data on one machine: no device is hostile (attack.kind)"
    private = config.privacy.epsilon > 0
    if recipe.private and not private:
        yield f"{name} without privacy: privacy.epsilon is 0, no noise is added"
    if private and config.data.scale == "global":
        yield (
            "data.scale = 'global': the means and deviations that features are scaled by are on"
            " no privacy ledger; use 'none' where that matters (docs/privacy.md)"
        )
    if private and program.report_loss:
        yield (
            f"{name}: the loss that devices would report is not covered by their privacy ledger"
            " and is not sent; the norm of their updates replaces it"
        )
    if private and program.feedback:
        yield (
            f"{name}: the feedback that devices would report is not covered by their privacy"
            " ledger and is not sent; clusters form by distance alone"
        )

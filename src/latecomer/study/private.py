"""The privacy mechanism and training spec of devices from the `[privacy]` table of a config."""

from dataclasses import fields, replace

from latecomer.core.messages import TrainSpec
from latecomer.device.ledger import multiplier_for
from latecomer.device.privacy import Privacy, per_release_multiplier
from latecomer.errors import BadInput
from latecomer.study.config import Config, PrivacyConfig


def training_spec(config: Config) -> TrainSpec:
    """The training spec of the config; with privacy per step, per-example gradients are clipped."""
    known = {field.name for field in fields(TrainSpec)}
    settings = config.training.model_dump(include=known)
    if config.training.local_steps:
        settings["local_epochs"] = 1  # of `local_steps` mini-batches
    spec, privacy = TrainSpec(**settings), config.privacy
    if not privacy.epsilon or privacy.where == "update":
        return spec
    if spec.clip:
        raise BadInput(
            f"training.clip = {spec.clip:g}: with privacy.epsilon the bound is privacy.clip"
            " (0 is the only value allowed here)"
        )
    return replace(spec, clip=privacy.clip, clip_norm=1 if privacy.noise == "laplace" else 2)


def privacy_of(settings: PrivacyConfig, spec: TrainSpec, examples: int) -> Privacy | None:
    """The privacy mechanism of a device with this number of examples; None if privacy is off.

    In mode "whole-run" the noise is calibrated so that `privacy.tasks` tasks spend at most
    `privacy.epsilon`.
    """
    if not settings.epsilon:
        return None
    _check(settings)
    made = Privacy(
        kind=settings.noise,
        multiplier=per_release_multiplier(settings.epsilon, settings.delta, settings.noise),
        clip=settings.clip,
        delta=settings.delta,
        where=settings.where,
        sampling=settings.sampling,
        denominator=settings.denominator,
        budget=settings.budget,
        accountant=settings.accountant,
    )
    if settings.mode == "per-step":
        return made
    one = made.release(examples, spec)
    needed = multiplier_for(
        settings.epsilon,
        settings.delta,
        settings.noise,
        one.rate,
        settings.tasks * made.releases(examples, spec),
        settings.accountant,
    )
    # The multiplier that is charged may be below the nominal one (privacy.denominator).
    multiplier = needed * (made.multiplier / one.multiplier)
    return replace(made, multiplier=multiplier, budget=settings.budget or settings.epsilon)


def _check(settings: PrivacyConfig) -> None:
    """Raise BadInput for values that exclude each other, naming their keys."""
    if settings.sampling == "shuffle":
        return
    if settings.where == "update":
        raise BadInput(
            "privacy.sampling = 'poisson' gains nothing with privacy.where = 'update': use shuffle"
        )
    if settings.noise == "laplace" and settings.accountant == "rdp":
        raise BadInput(
            "privacy.accountant = 'rdp' does not support Laplace noise on sampled examples"
            " (privacy.sampling = 'poisson'): use pld"
        )

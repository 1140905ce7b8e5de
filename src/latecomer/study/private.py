"""From the config's `privacy` to what a device does about it."""

from dataclasses import replace

from latecomer.core.messages import TrainSpec
from latecomer.device.ledger import multiplier_for
from latecomer.device.privacy import Privacy, per_release_multiplier
from latecomer.errors import BadInput
from latecomer.study.config import Config, PrivacyConfig


def training_spec(config: Config) -> TrainSpec:
    """The training program of the config; with privacy in every step its gradients are clipped."""
    spec, privacy = TrainSpec(**config.training.model_dump()), config.privacy
    if not privacy.epsilon or privacy.where == "update":
        return spec
    if spec.clip:
        raise BadInput(
            f"training.clip = {spec.clip:g}: with privacy.epsilon the bound is privacy.clip"
            " (0 is the only value allowed here)"
        )
    return replace(spec, clip=privacy.clip, clip_norm=1 if privacy.noise == "laplace" else 2)


def privacy_of(settings: PrivacyConfig, spec: TrainSpec, examples: int) -> Privacy | None:
    """How a device with so many examples protects them; None if privacy is off."""
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
    # What is charged may be less than the noise that is printed on the tin.
    multiplier = needed * (made.multiplier / one.multiplier)
    return replace(made, multiplier=multiplier, budget=settings.budget or settings.epsilon)


def _check(settings: PrivacyConfig) -> None:
    """Values that are right by themselves and wrong together, by the names of their keys."""
    if settings.sampling == "shuffle":
        return
    if settings.where == "update":
        raise BadInput(
            "privacy.sampling = 'poisson' gains nothing with privacy.where = 'update': use shuffle"
        )
    if settings.noise == "laplace" and settings.accountant == "rdp":
        raise BadInput(
            "privacy.accountant = 'rdp' knows no Laplace noise on examples that are sampled"
            " (privacy.sampling = 'poisson'): use pld"
        )

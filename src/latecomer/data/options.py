"""Options of the `[data]` table for reading a source; `sources` lists which source has which."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class SourceOptions:
    """Options for reading a source; an empty value or 0 means the source's default."""

    variant: str = ""
    sensors: tuple[str, ...] = ()
    label: str = ""
    activities: tuple[int, ...] = ()
    length: int = 0  # samples per window
    step: int = 0  # samples between the starts of two windows

    @property
    def given(self) -> tuple[str, ...]:
        """The options that are not at their default."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)

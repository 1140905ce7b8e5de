"""What a config may ask of a data source; which source takes which is in `sources`."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class SourceOptions:
    """Every value at its default means: as the source likes best."""

    variant: str = ""
    sensors: tuple[str, ...] = ()
    label: str = ""
    activities: tuple[int, ...] = ()
    length: int = 0
    step: int = 0

    @property
    def given(self) -> tuple[str, ...]:
        """The options that are not at their default."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)

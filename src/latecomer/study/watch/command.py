"""`latecomer watch`: start what is asked for, serve the page, and end gently."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from latecomer.errors import BadInput
from latecomer.study.config import load_config
from latecomer.study.watch.starting import Starter


def watch(
    folder: Path,
    host: str,
    port: int | None,
    configs: Sequence[Path],
    settings: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Serve until somebody ends it; runs started here end with a checkpoint."""
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise BadInput(
            f"latecomer watch needs {' and '.join(missing)}, which is not installed:"
            ' pip install "latecomer[watch]"'
        )
    if settings and not configs:
        raise BadInput("--set changes what --start starts: give --start CONFIG too")
    for config in configs:
        load_config(config, settings)
    if configs:
        folder.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder")
    from latecomer.study.watch.app import serve

    starter = Starter()
    run, address = serve(folder, starter, host, port)
    for config in configs:
        starter.start(config.resolve(), _free(folder.resolve(), config.stem), settings)
    say(f"watching {folder}: {address}")
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        for ended in starter.end_all():
            say(f"stopped; go on with `latecomer run --resume {ended}`")


def _free(folder: Path, name: str) -> Path:
    """The first number that is free; made at once, so that the next one is another."""
    number = 1
    while (path := folder / f"{name}-{number}").exists():
        number += 1
    path.mkdir()
    return path

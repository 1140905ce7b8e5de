"""`latecomer watch`: starts runs, serves the live page, checkpoints the runs at exit."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from latecomer.errors import BadInput
from latecomer.study.config import load_config
from latecomer.study.files import numbered_folder
from latecomer.study.watch.folders import is_run
from latecomer.study.watch.run_processes import RunProcesses


def watch(
    folder: Path,
    host: str,
    port: int | None,
    configs: Sequence[Path],
    settings: Sequence[str],
    echo: Callable[[str], None],
) -> None:
    """Serves until interrupted; then stops the runs started here, with a checkpoint each."""
    if settings and not configs:
        raise BadInput("--set applies to the runs of --start: give --start CONFIG too")
    if not configs and not folder.is_dir():
        raise BadInput(f"{folder}: no such folder")
    for config in configs:
        load_config(config, settings)
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise BadInput(
            f"latecomer watch needs {' and '.join(missing)}, which is not installed:"
            ' pip install "latecomer[watch]"'
        )
    if configs:
        _make(folder)
    from latecomer.study.watch.app import serve

    processes = RunProcesses()
    run, address = serve(folder, processes, host, port)
    for config in configs:
        new = numbered_folder(folder.resolve(), config.stem)
        new.mkdir()
        processes.start(config.resolve(), new, settings)
    echo(f"watching {folder}: {address}")
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        for stopped in processes.stop_all():
            echo(f"stopped; resume with `latecomer run --resume {stopped}`")


def _make(folder: Path) -> None:
    if is_run(folder):
        raise BadInput(f"{folder}: is the folder of a run; --start needs one for several runs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{folder}: cannot be written: {error.strerror}") from error

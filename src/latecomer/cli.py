"""The command line. It only calls the library, and imports it when a command needs it."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from latecomer.deploy.command import deploy
from latecomer.errors import BadInput, RunFailed

app = typer.Typer(
    name="latecomer",
    help="Asynchronous federated learning that does not leave slow devices behind.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# typer brings a click of its own or uses the installed one; either way this is its UsageError.
USAGE_ERROR: Any = typer.BadParameter.__base__
INTERRUPTED = 130  # what typer makes of a KeyboardInterrupt

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Change a config value.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for the results; must be new.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but the results' folder.")]

Seeds = Annotated[str, typer.Option(help="Numbers and ranges, as in 1,2 or 1-3.")]
Jobs = Annotated[int, typer.Option(min=1, help="Runs side by side.")]
Target = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, help="Accuracy for the time to target; default 95% of the best mean."
    ),
]
Log = Annotated[
    str, typer.Option("--log", metavar="NAMES", help="Also to tensorboard, mlflow, wandb.")
]


@app.command()
def run(
    config: Annotated[
        Path | None,
        typer.Argument(help="A TOML config or the folder of a Flower app; else the quickstart."),
    ] = None,
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help="Short for --set strategy.name=NAME.")
    ] = "",
    seed: Annotated[int | None, typer.Option(metavar="N", help="Short for --set seed=N.")] = None,
    settings: Settings = None,
    out: Out = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Continue the run in this folder.")
    ] = None,
    quiet: Quiet = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also print how the run is computed.")
    ] = False,
    log: Log = "",
) -> None:
    """Run one experiment."""
    short = {"strategy.name": strategy, "seed": "" if seed is None else seed}
    short_settings = [f"{key}={value}" for key, value in short.items() if value != ""]
    settings = _with_log([*(settings or []), *short_settings], log)
    if resume is not None and (config or out):
        raise BadInput("--resume takes no CONFIG or --out: the run's folder has its config")
    from rich.console import Console

    from latecomer.study.report import write_report
    from latecomer.study.runner import Silent, resume_run, start_run
    from latecomer.study.terminal import progress_for, summary_table

    console = Console()
    progress = Silent() if quiet else progress_for(console, verbose)
    if resume is not None:
        folder = resume
        summary = resume_run(folder, progress, settings=settings or [])
    else:
        parsed = _config(config, settings)
        source = Path(parsed.app.path).resolve().name if parsed.app.path else parsed.data.source
        folder = out or _run_folder(f"{source}-{parsed.strategy.name}")
        summary = start_run(parsed, folder, progress)
    report = write_report(folder)
    if quiet:
        typer.echo(folder)
        return
    console.print(summary_table(summary))
    for warning in summary["warnings"]:
        if warning not in progress.warnings:
            console.print(f"warning: {warning}", highlight=False, soft_wrap=True)
    console.print(f"results: {folder}\nreport:  {report}", highlight=False, soft_wrap=True)


@app.command()
def compare(
    config: Annotated[Path | None, typer.Argument(help="A TOML config: the scenario.")] = None,
    strategies: Annotated[str, typer.Option(help="Names, separated by commas.")] = "",
    seeds: Seeds = "1,2,3",
    out: Out = None,
    settings: Settings = None,
    jobs: Jobs = 1,
    target: Annotated[
        float | None,
        typer.Option(
            help="Accuracy, or other main metric, for the time to target; default: 5% off the best."
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Finish the comparison in this folder.")
    ] = None,
    quiet: Quiet = False,
    log: Log = "",
) -> None:
    """Run the same scenario under several strategies."""
    from rich.console import Console

    settings = _with_log(settings, log)
    if resume is not None and (config or strategies or settings or out):
        raise BadInput("--resume takes no CONFIG, --strategies, --set or --out: all are in DIR")

    from latecomer.study.compare import compare as compare_all
    from latecomer.study.compare import resume_comparison
    from latecomer.study.config import read_toml, with_settings
    from latecomer.study.metric_names import score_text
    from latecomer.study.report import write_report
    from latecomer.study.terminal import comparison_table

    console = Console()

    def on_run_done(cell: Any, summary: Any) -> None:
        if not quiet:
            line = f"{cell.strategy}, seed {cell.seed}: {score_text(summary)}"
            console.print(line, highlight=False)

    def on_note(note: str) -> None:
        if not quiet:
            console.print(f"note: {note}", highlight=False, markup=False)

    if resume is not None:
        folder = resume
        table = resume_comparison(folder, jobs, on_run_done)
    elif config is None:
        raise BadInput("Missing argument 'CONFIG'.")
    else:
        tree = with_settings(read_toml(config), settings or [])
        names = _listed(strategies, "--strategies")
        numbers = _seeds(seeds)
        folder = out or _run_folder(f"compare-{config.stem}")
        table = compare_all(tree, names, numbers, folder, jobs, target, on_run_done, on_note)
    report = write_report(folder)
    if quiet:
        typer.echo(folder)
        return
    width = console.width if console.is_terminal else 180
    Console(width=width).print(comparison_table(table, narrow=width < 150))
    console.print(f"results: {folder}\nreport:  {report}", highlight=False, soft_wrap=True)


@app.command()
def advise(
    what: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.toml|DIR",
            help="A config, or the folder of a run or comparison; without it the quickstart.",
        ),
    ] = None,
    trying: Annotated[
        bool, typer.Option("--try", help="Tune and compare them; the same --out continues.")
    ] = False,
    settings: Settings = None,
    seeds: Seeds = "1,2,3",
    out: Annotated[Path | None, typer.Option("--out", help="Folder for advice.json.")] = None,
    jobs: Jobs = 1,
    target: Target = None,
    audience: Annotated[
        str | None,
        typer.Option("--for", metavar="all|devices|late", help="Which accuracy the race compares."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print advice.json alone.")] = False,
) -> None:
    """Name the measured problems of a scenario or a run, and strategies and settings to try."""
    from latecomer.study.advice.command import advise_on

    folder = out
    if trying and folder is None:
        folder = _run_folder(f"advise-{what.stem if what else 'quickstart'}")
    numbers = _seeds(seeds) if trying else None
    advise_on(what, settings or [], folder, numbers, jobs, target, audience, as_json)


@app.command()
def tune(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML config; without one the quickstart.")
    ] = None,
    settings: Settings = None,
    seeds: Seeds = "1,2",
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for tune.json; the same one continues.")
    ] = None,
    jobs: Jobs = 1,
) -> None:
    """Find a learning rate: short runs of the configured strategy over a grid of training.lr."""
    from latecomer.study.advice.command import tune_rate

    folder = out or _run_folder(f"tune-{config.stem if config else 'quickstart'}")
    tune_rate(config, settings or [], folder, _seeds(seeds), jobs)


studies = typer.Typer(help="Whole studies on your own data.", no_args_is_help=True)
app.add_typer(studies, name="study")


@studies.command()
def har(
    config: Annotated[Path, typer.Argument(help="A TOML config: data, fleet, model, strategy.")],
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the results; a started study continues there."),
    ] = None,
    seeds: Seeds = "1,2,3",
    jobs: Jobs = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="A fifth of the updates, one change per decision.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Compare centralised, synchronous and asynchronous learning, and the effect of decisions.

    The same command again finishes what was interrupted.
    """
    from rich.console import Console

    from latecomer.study.config import read_toml, with_settings
    from latecomer.study.har.study import run_har

    console = Console()

    def on_run_done(cell: Any, summary: Any, done: int, total: int) -> None:
        if not quiet:
            line = f"{done}/{total} {cell.strategy}, seed {cell.seed}: {summary['macro_f1']:.3f}"
            console.print(line, highlight=False)

    tree = with_settings(read_toml(config), settings or [])
    folder = out or Path("runs") / f"study-har-{config.stem}"
    study = run_har(tree, _seeds(seeds), folder, jobs, quick, on_run_done)
    if quiet:
        typer.echo(folder)
        return
    console.print(study.text.split("## Tables")[0], markup=False, highlight=False, soft_wrap=True)
    names = f"results:  {folder / 'results.csv'}\nfindings: {folder / 'findings.md'}"
    console.print(f"{names}\nreport:   {folder / 'report.html'}", highlight=False, soft_wrap=True)


app.add_typer(deploy, name="deploy")


@app.command("list")
def list_(
    what: Annotated[Literal["strategies", "datasets", "models", "fleets"], typer.Argument()],
) -> None:
    """List strategies, datasets, models or fleets, one line each."""
    from latecomer.data.sources import SOURCES
    from latecomer.device.models import MODELS
    from latecomer.fleet.presets import PROFILES
    from latecomer.strategies.recipe import recipes

    registries: dict[str, Mapping[str, Any]] = {
        "strategies": recipes(), "datasets": SOURCES, "models": MODELS, "fleets": PROFILES
    }  # fmt: skip
    width = max(map(len, registries[what]))
    for name, entry in registries[what].items():
        paper = getattr(entry, "paper", "")
        typer.echo(f"{name:<{width}}  {entry.summary}" + (f"  [{paper}]" if paper else ""))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    kind: Annotated[
        Literal["html", "png", "svg", "pdf"],
        typer.Option("--format", help="A page, or pictures for a paper."),
    ] = "html",
) -> None:
    """(Re)write DIR/report.html from the files of a run or a comparison, or DIR/figures."""
    from latecomer.study.report import write_pictures, write_report

    typer.echo(write_report(folder) if kind == "html" else write_pictures(folder, kind))


@app.command("export")
def export_(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    kind: Annotated[
        Literal["torch", "onnx", "safetensors"],
        typer.Option("--format", help="A state_dict, a network for ONNX, or a copy."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the files; default RUN/export.")
    ] = None,
) -> None:
    """Write the models of a run as files of other programs."""
    from latecomer.study.export import export

    for path in export(run, kind, out):
        typer.echo(path)


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0: any free one.")] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; beyond loopback a token is needed.")
    ] = "127.0.0.1",
    start: Annotated[
        list[Path] | None,
        typer.Option("--start", metavar="CONFIG", help="Start this run in DIR; can be repeated."),
    ] = None,
    settings: Settings = None,
) -> None:
    """A live page of the running and finished runs in DIR."""
    from latecomer.study.watch.command import watch as watch_all

    watch_all(folder, host, port, start or [], settings or [], typer.echo)


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="A TOML config.")], settings: Settings = None
) -> None:
    """Check a config and its data, print it with all defaults filled in; run nothing."""
    from latecomer.study.compare import cells
    from latecomer.study.experiment import Experiment

    parsed = _config(config, settings)
    experiment = Experiment(parsed)
    for cell in cells(parsed.model_dump(mode="json"), list(parsed.compare), [parsed.seed]):
        Experiment(cell.config())
    for note in experiment.notes:
        typer.echo(f"# note: {note}")
    typer.echo(experiment.config.to_toml(), nl=False)


@app.command()
def data(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML config; without one the quickstart's data.")
    ] = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="A picture: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Show the data of a config: shapes, targets, examples of each device, late devices."""
    from latecomer.study.data_view import data_view, write_picture

    view = data_view(_config(config, settings))
    for line in view.lines():
        typer.echo(line)
    if out is not None:
        typer.echo(f"\npicture: {write_picture(view, out)}")


def _config(path: Path | None, settings: list[str] | None) -> Any:
    from latecomer.study.config import parse, quickstart, read_toml, with_settings

    tree = quickstart() if path is None else read_toml(path)
    return parse(with_settings(tree, settings or []), str(path or "quickstart"))


def _with_log(settings: list[str] | None, log: str) -> list[str] | None:
    """`--log a,b` is short for `--set log.sinks=["a","b"]`."""
    if not log:
        return settings
    names = ",".join(f'"{name}"' for name in _listed(log, "--log"))
    return [*(settings or []), f"log.sinks=[{names}]"]


def _run_folder(name: str) -> Path:
    from latecomer.study.files import numbered_folder

    return numbered_folder(Path("runs"), name.replace(":", "."))


def _listed(text: str, option: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise BadInput(f"{option}: name at least one, separated by commas")
    return found


def _seeds(text: str) -> list[int]:
    """The numbers of `1,2,5-7`; a range includes its end."""
    found: list[int] = []
    for part in _listed(text, "--seeds"):
        first, _, last = part.rpartition("-")
        try:
            numbers = range(int(first), int(last) + 1) if first else [int(part)]
        except ValueError:
            allowed = "must be whole numbers and ranges separated by commas, as in 1,2 or 1-3"
            raise BadInput(f"--seeds {text!r}: {allowed}") from None
        if not numbers:
            raise BadInput(f"--seeds {text!r}: the range {part} is empty; write {last}-{first}")
        found += numbers
    return found


@app.callback(invoke_without_command=True)
def entry(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True)
    ] = False,
) -> None:
    if version:
        from latecomer import __version__

        typer.echo(f"latecomer {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: bad input is one line and exit code 2, a failed run one line and 1."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except BadInput as error:
        _fail(str(error), 2)
    except USAGE_ERROR as error:
        # typer and click each add the same hint.
        _fail(re.sub(r"( Did you mean [^?]*\?)\1", r"\1", error.format_message()), 2)
    except RunFailed as error:
        _fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 1)
    if code == INTERRUPTED:
        _fail("interrupted", 1)
    sys.exit(code)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(code)

"""The commands of `latecomer deploy`. What they need is imported when they are called."""

import logging
from pathlib import Path
from typing import Annotated

import typer

deploy = typer.Typer(help="A real federation on Flower.", no_args_is_help=True)

Dir = Annotated[
    Path | None,
    typer.Option("--dir", help="The federation's folder; by default the one under runs/."),
]
Warm = Annotated[
    bool, typer.Option("--warm/--stock", help="Nodes whose client process stays, or Flower's own.")
]


@deploy.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    model: Annotated[str, typer.Option(help="A name, or your own as module:callable.")] = "mlp",
    data: Annotated[
        str, typer.Option(help="A source, as NAME or NAME:PATH, or an .npz file.")
    ] = "digits",
) -> None:
    """Make a Flower app: pyproject.toml, the server, the device, the model and the data."""
    from latecomer.deploy.scaffold import make_app

    for line in make_app(folder, model, data):
        typer.echo(line)


@deploy.command()
def up(
    app: Annotated[Path, typer.Argument(metavar="[APP_DIR]", help="A Flower app.")] = Path(),
    devices: Annotated[int, typer.Option(min=1, max=200, help="How many nodes.")] = 3,
    tls: Annotated[bool, typer.Option("--tls", help="Encrypted, nodes known by keys.")] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Everything is kept there; what is there goes on."),
    ] = None,
    warm: Warm = True,
    slowest: Annotated[
        float, typer.Option(min=0.0, help="Seconds by which the last device answers later.")
    ] = 2.0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the app."),
    ] = None,
) -> None:
    """Run an app on a federation of this machine, made for it and taken down after it."""
    from latecomer.deploy.up import up as run_all

    _show_warnings()
    run_all(app, devices, folder, tls, warm, slowest, settings or [], typer.echo)


@deploy.command()
def status(folder: Dir = None) -> None:
    """What runs, and how far it is."""
    from latecomer.deploy.up import status as show

    show(folder, typer.echo)


@deploy.command()
def down(folder: Dir = None) -> None:
    """End a federation that another terminal has started."""
    from latecomer.deploy.up import down as end

    end(folder, typer.echo)


@deploy.command()
def node(
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the SuperLink is.")],
    root_certificates: Annotated[
        Path | None, typer.Option(help="The authority that has signed the SuperLink's certificate.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The node's private key.")] = None,
    node_config: Annotated[
        str, typer.Option(metavar="'KEY=VALUE ...'", help="E.g. 'device-id=\"kitchen\"'.")
    ] = "",
    warm: Warm = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS: one machine only.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of loopback; 0: any.")] = 0,
    folder: Annotated[
        Path | None, typer.Option(help="For Flower's files; by default under ~/.latecomer/nodes.")
    ] = None,
) -> None:
    """A SuperNode that is started again whenever it ends."""
    from latecomer.deploy.serve_node import serve_node

    _show_warnings()
    serve_node(superlink, root_certificates, key, node_config, warm, insecure, port, folder)


def _show_warnings() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")

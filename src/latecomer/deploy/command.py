"""The commands of `latecomer deploy`. Their modules are imported when they are called."""

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
    bool,
    typer.Option("--warm/--stock", help="Nodes with a permanent client process, or stock ones."),
]


@deploy.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    model: Annotated[
        str, typer.Option(help="A name of `latecomer list models`, or module:callable.")
    ] = "mlp",
    data: Annotated[
        str, typer.Option(help="A source as NAME or NAME:PATH, or an .npz file.")
    ] = "digits",
) -> None:
    """Write a Flower app: pyproject.toml, server app, client app, model and data."""
    from latecomer.deploy.scaffold import make_app

    for line in make_app(folder, model, data):
        typer.echo(line)


@deploy.command()
def up(
    app: Annotated[Path, typer.Argument(metavar="[APP_DIR]", help="A Flower app.")] = Path(),
    devices: Annotated[int, typer.Option(min=1, max=200, help="Number of nodes.")] = 3,
    tls: Annotated[
        bool, typer.Option("--tls", help="TLS, and nodes authenticated by keys.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder of all files; an earlier run in it is resumed."),
    ] = None,
    warm: Warm = True,
    slowest: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds by which the last device delays its replies; device 0 does not.",
        ),
    ] = 2.0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the app."),
    ] = None,
) -> None:
    """Start a federation on this machine, run an app on it, and end the federation."""
    from latecomer.deploy.up import up as run_all

    _show_warnings()
    run_all(app, devices, folder, tls, warm, slowest, settings or [], typer.echo)


@deploy.command()
def status(folder: Dir = None) -> None:
    """Show the processes of a federation and the progress of its run."""
    from latecomer.deploy.up import status as show

    show(folder, typer.echo)


@deploy.command()
def down(folder: Dir = None) -> None:
    """End a federation that was started in another terminal."""
    from latecomer.deploy.up import down as end

    end(folder, typer.echo)


@deploy.command()
def node(
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the SuperLink.")],
    root_certificates: Annotated[
        Path | None, typer.Option(help="Certificate of the authority that signed the SuperLink's.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The node's private key.")] = None,
    node_config: Annotated[
        str, typer.Option(metavar="'KEY=VALUE ...'", help="E.g. 'device-id=\"kitchen\"'.")
    ] = "",
    warm: Warm = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS: on one machine only.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the node on loopback; 0: any.")
    ] = 0,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder of Flower's files; by default under ~/.latecomer/nodes."),
    ] = None,
    trusted_entities: Annotated[
        Path | None,
        typer.Option(metavar="YAML", help="Public keys by id: run only apps that they signed."),
    ] = None,
) -> None:
    """Run a SuperNode and start it again whenever it ends."""
    from latecomer.deploy.serve_node import serve_node

    _show_warnings()
    serve_node(
        superlink,
        root_certificates,
        key,
        node_config,
        warm,
        insecure,
        port,
        folder,
        trusted_entities,
    )


def _show_warnings() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")

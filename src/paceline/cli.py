"""The command line. Commands hold no logic, and nothing here imports torch before a command runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from paceline import __version__, launcher
from paceline.config import StrategySpec
from paceline.errors import PacelineError
from paceline.launcher.nodes import read_nodes

_NODES = (
    "nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "master_addr", "master_port",
    "local_addr", "standalone",
)  # fmt: skip
_LAUNCH = ("nproc", "module", "max_restarts", "monitor_seconds", "output", "tee")


def _hyphens(name: str) -> str:
    """torchrun takes --nproc_per_node as well as --nproc-per-node."""
    return name.replace("_", "-")


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_processes = _options(
    click.option(
        "--nproc", "--nproc-per-node", default="1", show_default=True, metavar="N",
        help="Processes on this machine: a number, or gpu, cpu, auto.",
    ),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as for python -m."),
    click.option(
        "--max-restarts", type=int, default=0, metavar="N", help="If one fails, start all again, N times at most."
    ),
    click.option(
        "--monitor-interval", "monitor_seconds", type=float, default=0.05, metavar="SECONDS",
        help="Between two looks at the processes.",
    ),
    click.option("--tee", default="", metavar="RANKS", help="Show the output of these ranks too: 1,3, 1-3 or all."),
    click.option("--output", metavar="DIR", help="Keep what the ranks other than 0 print in DIR/rank-N.log."),
)  # fmt: skip

_machines = _options(
    click.option("--nnodes", default="1", metavar="N|MIN:MAX", help="Number of machines."),
    click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where the machines meet: the first, a free port."),
    click.option("--rdzv-backend", metavar="NAME", help="How they meet: c10d, static or etcd-v2."),
    click.option("--rdzv-id", metavar="ID", help="Name of the run, alike on all machines."),
    click.option("--rdzv-conf", metavar="KEY=VALUE,...", help="Options of the rendezvous, such as join_timeout=900."),
    click.option("--node-rank", type=int, metavar="N", help="This machine's number, if you number them, from 0."),
    click.option("--master-addr", metavar="HOST", help="With --node-rank: the machine that has number 0."),
    click.option("--master-port", type=int, metavar="PORT", help="A free port there."),
    click.option("--local-addr", metavar="ADDRESS", help="The address by which the others reach this machine."),
    click.option("--standalone", is_flag=True, hidden=True),  # in many torchrun command lines; it is the default here
)  # fmt: skip

_settings = _options(
    click.option("--strategy", metavar="NAME[:KEY=VALUE,...]", help="How devices share the work, e.g. ddp."),
    click.option("--precision", metavar="NAME", help="fp32, bf16, fp16 or bf16-params."),
    click.option("--seed", type=int, metavar="N", help="Seed of the data order and of the models' randomness."),
    click.option("--batch-norm", metavar="NAME", help="global: statistics of the global batch; shard: of each shard."),
    click.option("--noise", metavar="NAME", help="Of dropout and the like: shard; example: the same for any number."),
    click.option("--compile/--no-compile", default=None, help="Compile the models with torch.compile."),
    click.option("--nonfinite", metavar="NAME", help="What an inf or NaN gradient does: stop or skip."),
    click.option("--reproducible", type=int, metavar="V", help="The same bits on any number of processes up to V."),
    click.option("--device", metavar="NAME", help="cpu, or a device; otherwise each process's own accelerator."),
    click.option("--config", metavar="FILE", help="Settings file; otherwise paceline.toml beside the script."),
    click.option("--log-dir", metavar="DIR", help="Where run.log writes (not the ranks' output: --output)."),
    click.option("--progress", metavar="NAME", help="bar, lines, off or auto."),
)  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _hyphens})
@click.version_option(__version__, prog_name="paceline")
def main() -> None:
    """One training script. Any number of devices. The same model."""


def _check_strategy(spec: StrategySpec | None, size: int | None, reproducible: int | None) -> int:
    """strategies.check. Its import loads torch, which the launcher needs soon after."""
    from paceline.strategies import check

    return check(spec, size, reproducible)


@main.command(context_settings={"allow_interspersed_args": False})
@_processes
@_machines
@_settings
@click.argument("script", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(context: click.Context, script: str, args: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT in N processes on each machine.

    torchrun's options of the same names mean the same. The settings override those in the script. All that follows
    SCRIPT is passed on to it, untouched.
    """
    nodes = {name: options.pop(name) for name in _NODES}
    launch = {name: options.pop(name) for name in _LAUNCH}
    given = {name: value for name, value in options.items() if value is not None}
    try:
        launch.update(settings=given, check_strategy=_check_strategy)
        context.exit(launcher.run(script, args, nodes=read_nodes(**nodes), **launch))
    except PacelineError as error:
        raise click.UsageError(str(error)) from None


def _trial_arguments(command: Callable[..., None]) -> Callable[..., None]:
    """The script, and the settings that all its trials share."""
    for add in (
        click.argument("args", nargs=-1, type=click.UNPROCESSED),
        click.argument("script", type=click.Path()),
        click.option("--config", metavar="FILE"),
        click.option("--batch-norm", metavar="NAME"),
        click.option("--seed", type=int, metavar="N"),
        click.option("--device", metavar="NAME", help="As for paceline run; so are the next three."),
        click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as for python -m."),
    ):
        command = add(command)
    return command


@main.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--nproc",
    "--nproc-per-node",
    default="2",
    show_default=True,
    metavar="N",
    help="Replicas: processes, or devices of one process. A number, or gpu, cpu, auto.",
)
@click.option("--strategies", metavar="NAME,...", help="Those to try, with options as for --strategy; otherwise all.")
@click.option("--precision", metavar="NAME,...", help="Try each strategy with each of these, such as fp32,bf16.")
@click.option("--global-batch", metavar="N,...", help="Try each with global batches of this many examples.")
@click.option("--steps", type=int, default=30, show_default=True, metavar="N", help="Steps of each trial.")
@click.option("--rounds", type=int, default=3, show_default=True, metavar="N", help="How often each is tried.")
@click.option(
    "--deadline", type=float, default=300.0, show_default=True, metavar="SECONDS", help="A longer trial is ended."
)
@click.option("--json", "json_file", metavar="FILE", help="Write the figures there.")
@click.option("--html", "html_file", metavar="FILE", help="Write them there as a page with charts.")
@_trial_arguments
@click.pass_context
def compare(context: click.Context, script: str, args: tuple[str, ...], module: bool, **options: Any) -> None:
    """Run SCRIPT for a few steps under each strategy, and print one table.

    Trials write no checkpoint, log or export of the script's. All that follows SCRIPT is passed on to it, untouched.
    """
    from paceline.compare import compare_command
    from paceline.compare.cases import CompareOptions
    from paceline.trials.start import Script

    shared = {name: options.pop(name) for name in ("device", "seed", "batch_norm", "config")}
    given = {name: value for name, value in shared.items() if value is not None}
    try:
        context.exit(compare_command.compare(CompareOptions(Script(script, args, module, given), **options)))
    except PacelineError as error:
        raise click.UsageError(str(error)) from None


@main.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--nproc", "--nproc-per-node", default="2", show_default=True, metavar="N",
    help="Processes: a number, or gpu, cpu, auto.",
)  # fmt: skip
@click.option("--steps", type=int, metavar="N", help="End the script after so many steps; otherwise it ends itself.")
@click.option("--deadline", type=float, metavar="SECONDS", help="End it after so long.")
@click.option("--json", "json_file", metavar="FILE", help="Write the findings there.")
@click.option("--tee", default="", metavar="RANKS", help="Show the output of these ranks too: 1,3, 1-3 or all.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as for python -m.")
@click.argument("script", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def doctor(context: click.Context, script: str, args: tuple[str, ...], **options: Any) -> None:
    """Run any PyTorch SCRIPT that was written for torchrun, watch it, and tell what is wrong with it.

    Exit code 1: a finding changes the model; 2: the script could not be watched. All that follows SCRIPT is passed on
    to it, untouched.
    """
    from paceline.doctor import doctor_command

    try:
        context.exit(doctor_command.doctor(doctor_command.DoctorOptions(script, args, **options)))
    except PacelineError as error:
        raise click.UsageError(str(error)) from None


@main.command(context_settings={"allow_interspersed_args": False})
@click.option("--nproc", "--nproc-per-node", default="2", show_default=True, metavar="N", help="As for paceline run.")
@click.option("--strategy", metavar="NAME[:KEY=VALUE,...]", help="The one in question; otherwise the script's own.")
@click.option("--precision", metavar="NAME", help="fp32, bf16, fp16 or bf16-params.")
@click.option("--steps", type=int, default=20, show_default=True, metavar="N", help="How many are compared.")
@click.option(
    "--deadline", type=float, default=300.0, show_default=True, metavar="SECONDS", help="A longer run is ended."
)
@click.option("--json", "json_file", metavar="FILE", help="Write what was found there.")
@_trial_arguments
@click.pass_context
def verify(context: click.Context, script: str, args: tuple[str, ...], module: bool, **options: Any) -> None:
    """Is SCRIPT's model the same on N processes as on one? If not, where it differs first, and why.

    Exit code: 0 the same, 1 different, 2 could not tell. All that follows SCRIPT is passed on to it, untouched.
    """
    from paceline.trials.start import Script
    from paceline.verify import verify_command
    from paceline.verify.runs import VerifyOptions

    shared = {name: options.pop(name) for name in ("device", "seed", "batch_norm", "config")}
    given = {name: value for name, value in shared.items() if value is not None}
    try:
        context.exit(verify_command.verify(VerifyOptions(Script(script, args, module, given), **options)))
    except PacelineError as error:
        raise click.UsageError(str(error)) from None


@main.command()
def env() -> None:
    """Print what a bug report needs: versions, devices, backends, environment variables."""
    from paceline.launcher.environment_report import environment_report

    click.echo(environment_report(), nl=False)

"""The command line. Commands hold no logic, and nothing here imports torch before a command runs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection
from typing import Any

import click
from click.core import ParameterSource

from paceline import __version__, launcher
from paceline.config import StrategySpec, resolve
from paceline.errors import PacelineError, SettingError, printable
from paceline.launcher import streams
from paceline.launcher.hosts import HostOptions, Meeting
from paceline.launcher.nodes import read_nodes
from paceline.launcher.report import UNWRITTEN
from paceline.launcher.secret import make_secret, read_secret, write_secret

_NODES = (
    "nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "master_addr", "master_port",
    "local_addr", "standalone", "rdzv_secret_file", "rdzv_insecure",
)  # fmt: skip
_SETTING_NAMES = (
    "strategy", "precision", "seed", "batch_norm", "noise", "compile", "nonfinite", "reproducible", "device", "config",
    "log_dir", "progress", "trace",
)  # fmt: skip
_LAUNCH = (
    "nproc",
    "module",
    "max_restarts",
    "memory_every",
    "monitor_seconds",
    "output",
    "tee",
    "grace",
    "stall_seconds",
    "stall_action",
)
_HOSTS = ("hosts", "hostfile", "python", "env", "ssh_port", "ssh_option")


def _hyphens(name: str) -> str:
    """torchrun takes --nproc_per_node as well as --nproc-per-node."""
    return name.replace("_", "-")


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _pet(name: str, **rest: Any) -> Callable[[Any], Any]:
    """An option that torchrun, and Kubernetes' PyTorchJob for it, also set by an environment variable, PET_NNODES."""
    return click.option(name, envvar=f"PET_{name[2:].replace('-', '_').upper()}", **rest)


_processes = _options(
    click.option(
        "--nproc", "--nproc-per-node", default="1", show_default=True, metavar="N",
        envvar="PET_NPROC_PER_NODE",
        help="Processes on this machine: a number, or gpu, cpu, auto. MIN:MAX: after restarts perhaps fewer.",
    ),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as for python -m."),
    click.option(
        "--max-restarts", type=int, default=0, metavar="N", envvar="PET_MAX_RESTARTS",
        help="If one fails, start all again, N times at most."
    ),
    click.option(
        "--memory-every", type=int, metavar="STEPS",
        help="Keep a checkpoint of each so many steps in memory too, for a restart.",
    ),
    click.option(
        "--monitor-interval", "monitor_seconds", type=float, default=0.05, metavar="SECONDS",
        envvar="PET_MONITOR_INTERVAL",
        help="Between two looks at the processes.",
    ),
    click.option(
        "--grace", type=float, metavar="SECONDS",
        help="Time to save a checkpoint at SIGTERM; 0: save none. Otherwise 25, if the script saves or restores."
    ),
    click.option(
        "--stall-timeout", "stall_seconds", type=float, metavar="SECONDS",
        help="Say which rank keeps the others waiting, after so long; otherwise by the time of a batch.",
    ),
    click.option(
        "--stall-action", metavar="NAME", default="say", help="Then say (the default), end or restart (--max-restarts)."
    ),
    click.option("--tee", default="", metavar="RANKS", help="Show the output of these ranks too: 1,3, 1-3 or all."),
    click.option("--output", metavar="DIR", help="Keep what the ranks other than 0 print in DIR/rank-N.log."),
)  # fmt: skip

_machines = _options(
    _pet("--nnodes", default="1", metavar="N|MIN:MAX", help="Number of machines."),
    _pet("--rdzv-endpoint", metavar="HOST:PORT", help="Where the machines meet: the first, a free port."),
    _pet("--rdzv-backend", metavar="NAME", help="How they meet: c10d, static or etcd-v2."),
    _pet("--rdzv-id", metavar="ID", help="Name of the run, alike on all machines."),
    _pet("--rdzv-conf", metavar="KEY=VALUE,...", help="Options of the rendezvous, such as join_timeout=900."),
    _pet("--node-rank", type=int, metavar="N", help="This machine's number, if you number them, from 0."),
    _pet("--master-addr", metavar="HOST", help="With --node-rank: the machine that has number 0."),
    _pet("--master-port", type=int, metavar="PORT", help="A free port there."),
    _pet("--local-addr", metavar="ADDRESS", help="The address by which the others reach this machine."),
    _pet(
        "--rdzv-secret-file", metavar="FILE", help="What the machines share: a file that `paceline secret` has made."
    ),
    click.option(
        "--rdzv-insecure", is_flag=True, help="Several machines without a secret: whoever reaches them is let in."
    ),
    click.option("--standalone", is_flag=True, hidden=True),  # in many torchrun command lines; it is the default here
)  # fmt: skip

_hosts = _options(
    click.option("--hosts", metavar="A,B|A:N,B:N", help="Start it on these machines, over ssh. N: processes there."),
    click.option("--hostfile", metavar="FILE", help="The same from a file: a host in each line, and slots=N."),
    click.option("--python", metavar="PATH", help="With --hosts: the interpreter there, if not at the same place."),
    click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="With --hosts: a variable to set there too."),
    click.option("--ssh-port", type=click.IntRange(1, 65535), metavar="PORT", help="With --hosts: ssh's port."),
    click.option("--ssh-option", multiple=True, metavar="KEY=VALUE", help="With --hosts: an option for ssh -o."),
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
    click.option("--trace", metavar="FILE", help="What each rank did when, for ui.perfetto.dev; and who was slow."),
)  # fmt: skip


class _Commands(click.Group):
    """All commands, whatever has become of the standard streams."""

    def main(self, *args: Any, **options: Any) -> Any:
        streams.reopen_closed()
        try:
            return super().main(*args, **options)
        except OSError as error:
            if error.errno not in streams.FULL:
                raise
            streams.write(sys.stderr, f"paceline: the output cannot be written: {error.strerror}.\n")
            with contextlib.suppress(OSError):  # else Python tries it once more at its exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(UNWRITTEN)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _hyphens})
@click.version_option(__version__, prog_name="paceline")
def main() -> None:
    """One training script. Any number of devices. The same model."""


def _check_strategy(spec: StrategySpec | None, size: int | None, reproducible: int | None) -> int:
    """strategies.check. Its import loads torch, which the launcher needs soon after."""
    from paceline.strategies import check

    return check(spec, size, reproducible)


@main.command(context_settings={"allow_interspersed_args": False})
@_processes
@_hosts
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
    hosts = HostOptions(**{name: options.pop(name) for name in _HOSTS})
    nodes = {name: options.pop(name) for name in _NODES}
    launch = {name: options.pop(name) for name in _LAUNCH}
    given = {name: value for name, value in options.items() if value is not None}
    try:
        if hosts.given:
            context.exit(_run_on_hosts(context, hosts, nodes, launch, given, (script, *args)))
        hosts.check_unused()
        launch.update(settings=given, check_strategy=_check_strategy)
        context.exit(launcher.run(script, args, nodes=read_nodes(**nodes), **launch))
    except PacelineError as error:
        raise click.UsageError(printable(str(error))) from None


def _run_on_hosts(
    context: click.Context,
    hosts: HostOptions,
    nodes: dict[str, Any],
    launch: dict[str, Any],
    settings: dict[str, Any],
    words: tuple[str, ...],
) -> int:
    """Hand the command line on to the hosts, as typed. Settings are checked here, since each host would refuse them."""
    from paceline.launcher.ssh import Job, run_on_hosts

    resolve(("the command line", {name: value for name, value in settings.items() if name != "config"}))
    typed = _typed(context, {*_LAUNCH, *_SETTING_NAMES} - {"nproc", "module"})
    typed += [f"--{name.replace('_', '-')}={nodes[name]}" for name in ("rdzv_id", "rdzv_conf") if nodes[name]]
    typed += ["--rdzv-insecure"] * nodes["rdzv_insecure"]
    meeting = Meeting(
        nodes["nnodes"],
        nodes["rdzv_backend"],
        nodes["rdzv_endpoint"],
        nodes["master_addr"],
        nodes["master_port"],
        {name: nodes[name] for name in ("node_rank", "local_addr", "standalone")},
    )
    nproc = launch["nproc"] if context.get_parameter_source("nproc") is ParameterSource.COMMANDLINE else None
    secret = None
    if not nodes["rdzv_insecure"] and nodes["rdzv_backend"] in (None, "c10d", "static"):
        file = nodes["rdzv_secret_file"]
        secret = make_secret() if file is None else read_secret(file)
    job = Job(words[0], launch["module"], words[1:], nproc, typed, meeting, __version__, launch["grace"], secret)
    return run_on_hosts(job, hosts)


def _typed(context: click.Context, names: Collection[str]) -> list[str]:
    """Those of these options that were given on the command line, written anew."""
    found = []
    for option in context.command.params:
        name = str(option.name)
        if name not in names or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if value is False and option.secondary_opts:
            found.append(option.secondary_opts[-1])
        else:
            found.append(option.opts[-1] if value is True else f"{option.opts[-1]}={value}")
    return found


@main.command()
@click.argument("file", type=click.Path())
def secret(file: str) -> None:
    """Write a new secret into FILE, for the machines of a run: paceline run --rdzv-secret-file FILE.

    Only this user can read FILE. One that exists is not overwritten.
    """
    try:
        write_secret(file)
    except PacelineError as error:
        raise click.UsageError(printable(str(error))) from None
    click.echo(f"{file}: a new secret. Copy it to all machines (scp -p keeps its mode), or keep it on a shared disk.")


# Options of `paceline run` that `paceline submit` passes on.
_FOR_THE_JOB = _options(
    click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as for python -m."),
    click.option("--max-restarts", type=int, metavar="N", help="As of paceline run; so are all that follow."),
    click.option("--tee", metavar="RANKS"),
    click.option("--output", metavar="DIR"),
    _settings,
)


@main.command(context_settings={"allow_interspersed_args": False})
@click.option("--slurm", is_flag=True, help="By Slurm's sbatch (the only one so far).")
@click.option("--nodes", type=int, default=1, show_default=True, metavar="N", help="How many machines.")
@click.option("--nproc", type=int, metavar="N", help="Processes on each; one for each GPU, if not given.")
@click.option("--gpus-per-node", "gpus", type=int, default=0, metavar="N", help="GPUs to reserve on each.")
@click.option("--time", metavar="TIME", help="The limit on the running time, as sbatch writes it: 1-12, 90, 2:30:00.")
@click.option("--partition", metavar="NAME")
@click.option("--account", metavar="NAME")
@click.option("--job-name", "name", metavar="NAME", help="The script's name, if not given.")
@click.option("--requeue", is_flag=True, help="When the job must make room: save a checkpoint, and wait in the queue.")
@click.option(
    "--signal", "notice", type=int, default=120, show_default=True, metavar="SECONDS",
    help="With --requeue: how long before its end the job is told.",
)  # fmt: skip
@click.option("--sbatch", "more", multiple=True, metavar="KEY=VALUE", help="Any option of sbatch. Again for each.")
@click.option("--rdzv-endpoint", "endpoint", metavar="HOST:PORT", help="Where nodes meet, if not at the first.")
@click.option("--dry-run", is_flag=True, help="Print the batch script, and submit nothing.")
@_FOR_THE_JOB
@click.argument("script", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def submit(context: click.Context, script: str, args: tuple[str, ...], slurm: bool, **options: Any) -> None:
    """Have a scheduler run SCRIPT, by one `paceline run` on each machine.

    All that follows SCRIPT is passed on to it, untouched.
    """
    from paceline.submit import submit_command
    from paceline.submit.slurm import Slurm

    if not slurm:
        raise click.UsageError("Which scheduler? `paceline submit --slurm ...` is the only one so far.")
    launch = {name: options.pop(name) for name in ("module", "max_restarts", "tee", "output")}
    settings = {name: options.pop(name) for name in _SETTING_NAMES}
    run = _typed(context, {**launch, **settings})
    settings = {name: value for name, value in settings.items() if value is not None}
    checked = {name: launch[name] for name in ("max_restarts", "tee") if launch[name] is not None}
    try:
        given = submit_command.SubmitOptions(script, args, launch["module"], settings, checked, run, **options)
        click.echo(submit_command.submit(Slurm(), given, _check_strategy), nl=False)
    except PacelineError as error:
        raise click.UsageError(printable(str(error))) from None


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
        raise click.UsageError(printable(str(error))) from None


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
        raise click.UsageError(printable(str(error))) from None


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
        raise click.UsageError(printable(str(error))) from None


@main.command()
@click.argument("checkpoint", type=click.Path())
@click.option("--to", type=click.Choice(["safetensors", "torch", "onnx"]), help="By FILE's ending, if not given.")
@click.option("-o", "--output", metavar="FILE", help="Otherwise model.safetensors, model.pt or model.onnx.")
@click.option("--name", metavar="NAME", help="Of several models: model_0, model_1, or one that run.track was given.")
@click.option("--prefix", default="", metavar="TEXT", help="Only tensors whose names begin so, which is taken off.")
@click.option("--dtype", type=click.Choice(["fp32", "fp16", "bf16"]), help="Otherwise that of the checkpoint.")
@click.option("--force", is_flag=True, help="Replace FILE.")
@click.option("--model", metavar="MODULE:NAME", help="For onnx: what makes the model. FILE.py:NAME too.")
@click.option(
    "--input", multiple=True, metavar="[NAME=]SHAPE[:DTYPE[:LIMIT]]",
    help="For onnx: what forward takes, as 1x3x32x32 or 1x128:int64:50257; examples first. Again for each input.",
)  # fmt: skip
@click.option("--inputs", metavar="MODULE:NAME", help="In place of --input: a function that returns examples.")
@click.option("--check/--no-check", default=None, help="For onnx: run FILE with onnxruntime, if that is installed.")
def export(**options: Any) -> None:
    """Write a model of CHECKPOINT (what run.save made, of any strategy) as a file for other programs."""
    from paceline.export import export_command

    try:
        export_command.export(export_command.ExportOptions(**options))
    except SettingError as error:
        raise click.UsageError(printable(str(error))) from None
    except PacelineError as error:
        raise click.ClickException(printable(str(error))) from None


@main.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path())
@click.pass_context
def check(context: click.Context, paths: tuple[str, ...]) -> None:
    """Say whether checkpoints, and files that were exported, are as they were written. Exit status 1: one is not.

    PATH: a directory that run.save was given, one checkpoint in it, or an exported file with its FILE.sha256 beside it.
    """
    from paceline.export import check_command

    try:
        context.exit(check_command.check(paths))
    except PacelineError as error:
        raise click.ClickException(printable(str(error))) from None


@main.command()
def env() -> None:
    """Print what a bug report needs: versions, devices, backends, environment variables."""
    from paceline.launcher.environment_report import environment_report

    click.echo(printable(environment_report()), nl=False)

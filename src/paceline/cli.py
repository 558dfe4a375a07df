"""The command line. Commands contain no logic, and this module does not import torch before a command runs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import click
from click.core import ParameterSource

from paceline import __version__, launcher
from paceline.config import StrategySpec, resolve
from paceline.errors import PacelineError, SettingError, printable
from paceline.launcher import streams
from paceline.launcher.hosts import HostOptions, HostRendezvous
from paceline.launcher.nodes import read_nodes
from paceline.launcher.report import UNWRITTEN
from paceline.launcher.secret import make_secret, read_secret, write_secret

_NODES = (
    "nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "master_addr", "master_port",
    "local_addr", "standalone", "rdzv_secret_file", "rdzv_insecure",
)  # fmt: skip
_SETTING_NAMES = (
    "strategy", "precision", "seed", "batch_norm", "noise", "compile", "nonfinite", "reproducible", "balance", "device",
    "config", "log_dir", "progress", "trace", "peak_flops",
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
    """Replace underscores in an option's name: torchrun accepts --nproc_per_node and --nproc-per-node."""
    return name.replace("_", "-")


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _pet(name: str, **rest: Any) -> Callable[[Any], Any]:
    """An option with torchrun's environment variable, such as PET_NNODES. Kubernetes' PyTorchJob sets them."""
    return click.option(name, envvar=f"PET_{name[2:].replace('-', '_').upper()}", **rest)


_processes = _options(
    click.option(
        "--nproc", "--nproc-per-node", default="1", show_default=True, metavar="N",
        envvar="PET_NPROC_PER_NODE",
        help="Start N processes per machine: a number, MIN:MAX, gpu, cpu, auto.",
    ),
    click.option("-m", "--module", is_flag=True, help="Run SCRIPT as a module, like python -m."),
    click.option(
        "--max-restarts", type=int, default=0, metavar="N", envvar="PET_MAX_RESTARTS",
        help="Restart all processes after a failure, at most N times."
    ),
    click.option(
        "--memory-every", type=int, metavar="N",
        help="Save an in-memory checkpoint every N steps, for fast restarts.",
    ),
    click.option(
        "--monitor-interval", "monitor_seconds", type=float, default=0.05, metavar="SECONDS",
        envvar="PET_MONITOR_INTERVAL",
        help="Check the processes every SECONDS.",
    ),
    click.option(
        "--grace", type=float, metavar="SECONDS",
        help="At SIGTERM, allow SECONDS for a checkpoint; 0: save none. Default: 25, if SCRIPT saves."
    ),
    click.option(
        "--stall-timeout", "stall_seconds", type=float, metavar="SECONDS",
        help="Report a stalled rank after SECONDS. Default: from batch times.",
    ),
    click.option(
        "--stall-action", metavar="NAME", default="say", help="After a stall: say (default), end or restart."
    ),
    click.option("--tee", default="", metavar="RANKS", help="Show the output of these ranks too: 1,3, 1-3 or all."),
    click.option("--output", metavar="DIR", help="Write the output of ranks above 0 to DIR/rank-N.log."),
)  # fmt: skip

_machines = _options(
    _pet("--nnodes", default="1", metavar="N|MIN:MAX", help="Use this number of machines."),
    _pet("--rdzv-endpoint", metavar="HOST:PORT", help="Use this rendezvous host and a free port on it."),
    _pet("--rdzv-backend", metavar="NAME", help="Use this rendezvous backend: c10d, static or etcd-v2."),
    _pet("--rdzv-id", metavar="ID", help="Identify the run by this ID, the same on all machines."),
    _pet("--rdzv-conf", metavar="KEY=VALUE,...", help="Set rendezvous options, such as join_timeout=900."),
    _pet("--node-rank", type=int, metavar="N", help="Give this machine's number, from 0. Optional."),
    _pet("--master-addr", metavar="HOST", help="With --node-rank: connect to machine 0 at HOST."),
    _pet("--master-port", type=int, metavar="PORT", help="With --node-rank: use this free port of machine 0."),
    _pet("--local-addr", metavar="ADDRESS", help="Let other machines reach this one at ADDRESS."),
    _pet("--rdzv-secret-file", metavar="FILE", help="Authenticate with a file made by `paceline secret`."),
    click.option("--rdzv-insecure", is_flag=True, help="Accept any machine that connects, without a secret."),
    click.option("--standalone", is_flag=True, hidden=True),  # common with torchrun; the default here
)  # fmt: skip

_hosts = _options(
    click.option("--hosts", metavar="A,B|A:N,B:N", help="Start on these hosts over ssh, N processes on each."),
    click.option("--hostfile", metavar="FILE", help="Read the hosts from FILE: one per line, with slots=N."),
    click.option("--python", metavar="PATH", help="Use this interpreter on the hosts. Default: the path of this one."),
    click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="Set a variable on the hosts. Repeatable."),
    click.option("--ssh-port", type=click.IntRange(1, 65535), metavar="PORT", help="Connect to this ssh port."),
    click.option("--ssh-option", multiple=True, metavar="KEY=VALUE", help="Pass an option to ssh -o. Repeatable."),
)  # fmt: skip

_settings = _options(
    click.option("--strategy", metavar="NAME[:KEY=VALUE,...]", help="Train with this strategy, such as ddp."),
    click.option("--precision", metavar="NAME", help="Compute in fp32, bf16, fp16 or bf16-params."),
    click.option("--seed", type=int, metavar="N", help="Seed the data order and the models' randomness."),
    click.option("--batch-norm", metavar="NAME", help="Take batch statistics over the global batch or each shard."),
    click.option("--noise", metavar="NAME", help="Key dropout and other noise by shard or by example."),
    click.option("--compile/--no-compile", default=None, help="Compile the models with torch.compile."),
    click.option("--nonfinite", metavar="NAME", help="At an inf or NaN gradient: stop or skip."),
    click.option("--reproducible", type=int, metavar="V", help="Get the same bits on 1 to V processes."),
    click.option("--balance/--no-balance", default=None, help="Give each process a share that fits its speed."),
    click.option("--device", metavar="NAME", help="Train on this device. Default: one accelerator per process."),
    click.option("--config", metavar="FILE", help="Read settings from FILE. Default: paceline.toml beside SCRIPT."),
    click.option("--log-dir", metavar="DIR", help="Write the records of run.log to DIR."),
    click.option("--progress", metavar="NAME", help="Show progress as bar, lines, off or auto."),
    click.option("--trace", metavar="FILE", help="Trace every rank to FILE, for ui.perfetto.dev; report slow ranks."),
    click.option("--peak-flops", metavar="auto|RATE", help="Log the part of this peak that is reached (MFU)."),
)  # fmt: skip

# Titles in a command's help, and the options below them. Options without a title come first, under "Options".
_SETTINGS_TITLE = "Settings (override the script)"
_JOB_TITLES: dict[str, Collection[str]] = {
    "Processes": _LAUNCH,
    "Hosts over ssh": _HOSTS,
    "Rendezvous of several machines": _NODES,
    _SETTINGS_TITLE: _SETTING_NAMES,
    "Help": ("help",),
}
_TRIAL_TITLES = {_SETTINGS_TITLE: ("device", "seed", "batch_norm", "config")}


class _Command(click.Command):
    """A command. Its help begins with an example, and shows the options in groups.

    Args:
        example: a command line.
        titles: title -> names of the options below it.
    """

    def __init__(self, *args: Any, example: str, titles: Mapping[str, Collection[str]] = {}, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.example = example
        self.titles = titles

    def format_help_text(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\nExample:\n  {self.example}\n")
        super().format_help_text(context, formatter)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {"Options": [], **{title: [] for title in self.titles}}
        for option in self.get_params(context):
            title = next((title for title, names in self.titles.items() if option.name in names), "Options")
            record = option.get_help_record(context) if isinstance(option, click.Option) else None
            if record is not None:
                rows[title].append(record)
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class _Commands(click.Group):
    """The group of all commands. Handles closed standard streams and output to a full disk."""

    command_class = _Command

    def main(self, *args: Any, **options: Any) -> Any:
        streams.reopen_closed()
        try:
            return super().main(*args, **options)
        except OSError as error:
            if error.errno not in streams.FULL:
                raise
            streams.write(sys.stderr, f"paceline: cannot write the output: {error.strerror}.\n")
            with contextlib.suppress(OSError):  # otherwise Python writes again at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(UNWRITTEN)


@click.group(
    cls=_Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": _hyphens,
        "max_content_width": 110,
    },
)
@click.version_option(__version__, prog_name="paceline")
def main() -> None:
    """One training script. Any number of devices. The same model.

    \b
    Examples:
      paceline run --nproc 4 train.py       train on 4 processes
      paceline verify --nproc 4 train.py    check that 4 processes train the same model as 1
    """


def _check_strategy(spec: StrategySpec | None, size: int | None, reproducible: int | None) -> int:
    """Call strategies.check. The import loads torch, which the launcher needs soon after anyway."""
    from paceline.strategies import check

    return check(spec, size, reproducible)


@main.command(
    example="paceline run --nproc 4 --max-restarts 3 train.py --epochs 10",
    titles=_JOB_TITLES,
    context_settings={"allow_interspersed_args": False},
)
@_processes
@_hosts
@_machines
@_settings
@click.argument("script", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(context: click.Context, script: str, args: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT on several processes, on one machine or many.

    Options that torchrun also has mean the same. Everything after SCRIPT is passed to SCRIPT.
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
    """Run the typed command line on the hosts. Check the settings here first: every host would refuse invalid ones."""
    from paceline.launcher.ssh import Job, run_on_hosts

    resolve(("the command line", {name: value for name, value in settings.items() if name != "config"}))
    typed = _typed(context, {*_LAUNCH, *_SETTING_NAMES} - {"nproc", "module"})
    typed += [f"--{name.replace('_', '-')}={nodes[name]}" for name in ("rdzv_id", "rdzv_conf") if nodes[name]]
    typed += ["--rdzv-insecure"] * nodes["rdzv_insecure"]
    rendezvous = HostRendezvous(
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
    job = Job(words[0], launch["module"], words[1:], nproc, typed, rendezvous, __version__, launch["grace"], secret)
    return run_on_hosts(job, hosts)


def _typed(context: click.Context, names: Collection[str]) -> list[str]:
    """Return the options in `names` that the user typed, as words of a command line."""
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


@main.command(example="paceline secret run.secret")
@click.argument("file", type=click.Path())
def secret(file: str) -> None:
    """Write a new secret to FILE, for a run on several machines.

    Give it to every launcher: paceline run --rdzv-secret-file FILE. Only you can read FILE. An existing file is not
    overwritten.
    """
    try:
        write_secret(file)
    except PacelineError as error:
        raise click.UsageError(printable(str(error))) from None
    click.echo(f"Wrote a new secret to {file}. Copy it to all machines (scp -p keeps its mode) or to a shared disk.")


# Options that `paceline submit` passes to `paceline run`.
_FOR_THE_JOB = _options(
    click.option("-m", "--module", is_flag=True, help="Run SCRIPT as a module, like python -m."),
    click.option(
        "--max-restarts", type=int, metavar="N", help="Restart all processes after a failure, at most N times."
    ),
    click.option("--tee", metavar="RANKS", help="Show the output of these ranks too: 1,3, 1-3 or all."),
    click.option("--output", metavar="DIR", help="Write the output of ranks above 0 to DIR/rank-N.log."),
    _settings,
)


@main.command(
    example="paceline submit --slurm --nodes 2 --gpus-per-node 8 --time 2:00:00 train.py",
    titles={
        "Processes": ("nproc", "module", "max_restarts", "tee", "output", "endpoint"),
        _SETTINGS_TITLE: _SETTING_NAMES,
    },
    context_settings={"allow_interspersed_args": False},
)
@click.option("--slurm", is_flag=True, help="Submit with Slurm's sbatch (the only scheduler so far).")
@click.option("--nodes", type=int, default=1, show_default=True, metavar="N", help="Run on N machines.")
@click.option("--nproc", type=int, metavar="N", help="Start N processes per machine. Default: one per GPU.")
@click.option("--gpus-per-node", "gpus", type=int, default=0, metavar="N", help="Reserve N GPUs per machine.")
@click.option("--time", metavar="TIME", help="Limit the running time, in sbatch's format: 1-12, 90, 2:30:00.")
@click.option("--partition", metavar="NAME", help="Submit to this partition.")
@click.option("--account", metavar="NAME", help="Charge this account.")
@click.option("--job-name", "name", metavar="NAME", help="Name the job. Default: the script's name.")
@click.option("--requeue", is_flag=True, help="When preempted, save a checkpoint and requeue the job.")
@click.option(
    "--signal", "notice", type=int, default=120, show_default=True, metavar="SECONDS",
    help="With --requeue: notify the job SECONDS before its end.",
)  # fmt: skip
@click.option("--sbatch", "more", multiple=True, metavar="KEY=VALUE", help="Pass an option to sbatch. Repeatable.")
@click.option(
    "--rdzv-endpoint", "endpoint", metavar="HOST:PORT", help="Use this rendezvous host. Default: the first node."
)
@click.option("--dry-run", is_flag=True, help="Print the batch script and submit nothing.")
@_FOR_THE_JOB
@click.argument("script", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def submit(context: click.Context, script: str, args: tuple[str, ...], slurm: bool, **options: Any) -> None:
    """Submit SCRIPT to a scheduler, with one `paceline run` on each machine.

    Everything after SCRIPT is passed to SCRIPT.
    """
    from paceline.submit import submit_command
    from paceline.submit.slurm import Slurm

    if not slurm:
        raise click.UsageError("No scheduler given. Write `paceline submit --slurm ...`; Slurm is the only one so far.")
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


def _trial_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that all trials share."""
    for add in (
        click.option("--config", metavar="FILE", help="Read settings from FILE. Default: paceline.toml beside SCRIPT."),
        click.option("--batch-norm", metavar="NAME", help="Take batch statistics over the global batch or each shard."),
        click.option("--seed", type=int, metavar="N", help="Seed the data order and the models' randomness."),
        click.option("--device", metavar="NAME", help="Train on this device. Default: one accelerator per process."),
        click.option("-m", "--module", is_flag=True, help="Run SCRIPT as a module, like python -m."),
    ):
        command = add(command)
    return command


def _trial_arguments(command: Callable[..., None]) -> Callable[..., None]:
    """Add SCRIPT, its arguments, and the options that `compare` and `verify` share."""
    command = click.argument("args", nargs=-1, type=click.UNPROCESSED)(command)
    return _trial_options(click.argument("script", type=click.Path())(command))


@main.command(
    example="paceline compare --nproc 4 --strategies ddp,fsdp train.py",
    titles=_TRIAL_TITLES,
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--nproc",
    "--nproc-per-node",
    default="2",
    show_default=True,
    metavar="N",
    help="Train N replicas: a number, gpu, cpu or auto.",
)
@click.option("--strategies", metavar="NAME,...", help="Try these strategies, written as for --strategy. Default: all.")
@click.option("--precision", metavar="NAME,...", help="Try each strategy in these precisions, such as fp32,bf16.")
@click.option("--global-batch", metavar="N,...", help="Try each strategy with these global batch sizes.")
@click.option("--steps", type=int, default=30, show_default=True, metavar="N", help="Train N steps per trial.")
@click.option("--rounds", type=int, default=3, show_default=True, metavar="N", help="Repeat each trial N times.")
@click.option(
    "--deadline", type=float, default=300.0, show_default=True, metavar="SECONDS", help="Stop a trial after SECONDS."
)
@click.option("--json", "json_file", metavar="FILE", help="Write the measurements to FILE.")
@click.option("--html", "html_file", metavar="FILE", help="Write a page with charts to FILE.")
@_trial_arguments
@click.pass_context
def compare(context: click.Context, script: str, args: tuple[str, ...], module: bool, **options: Any) -> None:
    """Train a few steps of SCRIPT under each strategy, and print one table.

    A trial skips the script's checkpoints, logs and exports. Everything after SCRIPT is passed to SCRIPT.
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


@main.command(
    example="paceline plan --nodes 8 --gpus 8 --gpu h100 --node-bandwidth 400GB/s --precision bf16 train.py",
    titles={
        "Cluster": (
            "nodes", "gpus", "gpu", "memory", "bandwidth", "node_bandwidth", "latency", "node_latency", "host_memory",
            "host_bandwidth", "flops", "mfu", "speed",
        ),
        **_TRIAL_TITLES,
    },
    context_settings={"allow_interspersed_args": False},
)  # fmt: skip
@click.option("--nodes", type=int, default=1, show_default=True, metavar="N", help="Plan for N machines.")
@click.option("--gpus", type=int, default=1, show_default=True, metavar="N", help="Plan for N devices per machine.")
@click.option("--gpu", metavar="NAME", help="Take the public figures of this device, such as h100.")
@click.option("--memory", metavar="SIZE", help="Memory of a device, such as 80GB.")
@click.option("--bandwidth", metavar="RATE", help="Rate between devices of a machine, such as 450GB/s.")
@click.option("--node-bandwidth", metavar="RATE", help="Rate of a machine to the others, such as 400Gbit/s.")
@click.option("--latency", type=float, default=0.0, metavar="SECONDS", help="Time of a message within a machine.")
@click.option("--node-latency", type=float, default=0.0, metavar="SECONDS", help="Time of a message between machines.")
@click.option("--host-memory", metavar="SIZE", help="Main memory of a machine.")
@click.option("--host-bandwidth", metavar="RATE", help="Rate between a device and its host.")
@click.option("--flops", metavar="RATE", help="Peak of a device, such as 989TFLOP/s.")
@click.option("--mfu", metavar="LOW[:HIGH]", help="Fraction of the peak that training reaches, such as 0.35:0.5.")
@click.option("--speed", type=float, metavar="X", help="Devices are X times as fast as the measured process.")
@click.option("--strategies", metavar="NAME,...", help="Plan these strategies. Default: all.")
@click.option("--precision", metavar="NAME", help="Measure in fp32, bf16, fp16 or bf16-params.")
@click.option("--global-batch", type=int, metavar="N", help="Plan for N examples per step. Default: as measured.")
@click.option("--measured-batch", type=int, metavar="N", help="Measure with N examples per step.")
@click.option("--steps", type=int, default=10, show_default=True, metavar="N", help="Measure N steps.")
@click.option(
    "--deadline", type=float, default=300.0, show_default=True, metavar="SECONDS", help="Stop measuring after SECONDS."
)
@click.option("--from", "source", metavar="FILE", help="Use the measurement in FILE, written by --json, not a SCRIPT.")
@click.option("--json", "json_file", metavar="FILE", help="Write the plan and the measurement to FILE.")
@_trial_options
@click.argument("script", type=click.Path(), required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def plan(context: click.Context, script: str | None, args: tuple[str, ...], module: bool, **options: Any) -> None:
    """Measure a few steps of SCRIPT in one process, and compute what each strategy would need on a cluster.

    Shows the memory of a device, the time of a step, and what runs out first. Nothing starts on the cluster.
    Everything after SCRIPT is passed to SCRIPT.
    """
    from paceline.planning import plan_command
    from paceline.planning.cluster import ClusterOptions
    from paceline.trials.start import Script

    shared = {name: options.pop(name) for name in ("device", "seed", "batch_norm", "config")}
    given = {name: value for name, value in shared.items() if value is not None}
    cluster = ClusterOptions(**{name: options.pop(name) for name in ClusterOptions.__dataclass_fields__})
    try:
        measured = None if script is None else Script(script, args, module, given)
        context.exit(plan_command.plan(plan_command.PlanOptions(measured, cluster, **options)))
    except PacelineError as error:
        raise click.UsageError(printable(str(error))) from None


@main.command(
    example="paceline doctor --nproc 2 --steps 20 train.py",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--nproc", "--nproc-per-node", default="2", show_default=True, metavar="N",
    help="Start N processes: a number, gpu, cpu or auto.",
)  # fmt: skip
@click.option("--steps", type=int, metavar="N", help="Stop after N steps. Default: let the script finish.")
@click.option("--deadline", type=float, metavar="SECONDS", help="Stop after SECONDS.")
@click.option("--json", "json_file", metavar="FILE", help="Write the findings to FILE.")
@click.option("--tee", default="", metavar="RANKS", help="Show the output of these ranks too: 1,3, 1-3 or all.")
@click.option("-m", "--module", is_flag=True, help="Run SCRIPT as a module, like python -m.")
@click.option("--resume", is_flag=True, help="Kill SCRIPT after a checkpoint, resume it, and compare.")
@click.option("--checkpoints", metavar="DIR", help="SCRIPT writes its checkpoints into DIR, which is empty.")
@click.option("--resume-args", metavar="ARGS", help="Resume with these arguments; {latest}: the newest entry of DIR.")
@click.option("--resume-nproc", metavar="N", help="Resume on N processes.")
@click.option("--seed", type=int, metavar="N", help="Choose the step of the kill by N. Default: by chance.")
@click.argument("script", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def doctor(context: click.Context, script: str, args: tuple[str, ...], **options: Any) -> None:
    """Run a PyTorch SCRIPT written for torchrun, and report errors in its distributed training.

    With --resume: kill SCRIPT after a checkpoint, resume it, and report what differs. SCRIPT need not use Paceline.
    Exit code: 1 if a finding changes the model, 2 if SCRIPT could not be observed.
    Everything after SCRIPT is passed to SCRIPT.
    """
    from paceline.doctor import doctor_command
    from paceline.doctor.resume import resume_command

    of_resume = {name: options.pop(name) for name in ("checkpoints", "resume_args", "resume_nproc", "seed")}
    given = [name for name, value in of_resume.items() if value is not None]
    try:
        if options.pop("resume"):
            if of_resume["checkpoints"] is None:
                raise SettingError("--resume needs --checkpoints DIR: an empty folder that SCRIPT saves into.")
            if options.pop("tee"):
                raise SettingError("--tee does not work with --resume, which hides the output of all ranks.")
            context.exit(
                resume_command.doctor_resume(resume_command.ResumeOptions(script, args=args, **options, **of_resume))
            )
        if given:
            raise SettingError(f"--{given[0].replace('_', '-')} needs --resume.")
        context.exit(doctor_command.doctor(doctor_command.DoctorOptions(script, args, **options)))
    except PacelineError as error:
        raise click.UsageError(printable(str(error))) from None


@main.command(
    example="paceline verify --nproc 4 --strategy fsdp train.py",
    titles=_TRIAL_TITLES,
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--nproc", "--nproc-per-node", default="2", show_default=True, metavar="N",
    help="Compare N processes with one: a number, gpu, cpu or auto.",
)  # fmt: skip
@click.option("--strategy", metavar="NAME[:KEY=VALUE,...]", help="Verify this strategy. Default: the script's.")
@click.option("--precision", metavar="NAME", help="Compute in fp32, bf16, fp16 or bf16-params.")
@click.option("--balance/--no-balance", default=None, help="Verify shares of unequal size, as --balance cuts them.")
@click.option("--steps", type=int, default=20, show_default=True, metavar="N", help="Compare N steps.")
@click.option(
    "--deadline", type=float, default=300.0, show_default=True, metavar="SECONDS", help="Stop a run after SECONDS."
)
@click.option("--json", "json_file", metavar="FILE", help="Write the findings to FILE.")
@_trial_arguments
@click.pass_context
def verify(context: click.Context, script: str, args: tuple[str, ...], module: bool, **options: Any) -> None:
    """Check that SCRIPT trains the same model on N processes as on one.

    If not, report where the models differ first, and why. Exit code: 0 the same, 1 different, 2 unknown. Everything
    after SCRIPT is passed to SCRIPT.
    """
    from paceline.trials.start import Script
    from paceline.verify import verify_command
    from paceline.verify.runs import VerifyOptions

    shared = {name: options.pop(name) for name in ("device", "seed", "batch_norm", "balance", "config")}
    given = {name: value for name, value in shared.items() if value is not None}
    try:
        context.exit(verify_command.verify(VerifyOptions(Script(script, args, module, given), **options)))
    except PacelineError as error:
        raise click.UsageError(printable(str(error))) from None


@main.command(
    example="paceline export checkpoints/step-00001000 --to onnx --model train:build --input 1x3x32x32",
    titles={"ONNX": ("model", "input", "inputs", "check")},
)
@click.argument("checkpoint", type=click.Path())
@click.option(
    "--to", type=click.Choice(["safetensors", "torch", "onnx"]), help="Write this format. Default: from FILE's suffix."
)
@click.option(
    "-o", "--output", metavar="FILE", help="Write to FILE. Default: model.safetensors, model.pt or model.onnx."
)
@click.option(
    "--name", metavar="NAME", help="Choose one of several models: model_0, model_1, or its name in run.track."
)
@click.option(
    "--prefix", default="", metavar="TEXT", help="Export tensors with this prefix only, and remove the prefix."
)
@click.option("--dtype", type=click.Choice(["fp32", "fp16", "bf16"]), help="Convert to this dtype.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--model", metavar="MODULE:NAME", help="Build the model with this function (or FILE.py:NAME).")
@click.option(
    "--input", multiple=True, metavar="[NAME=]SHAPE[:DTYPE[:LIMIT]]",
    help="Describe an input of forward, such as 1x3x32x32 or 1x128:int64:50257, batch size first. Repeatable.",
)  # fmt: skip
@click.option("--inputs", metavar="MODULE:NAME", help="Take example inputs from this function, instead of --input.")
@click.option("--check/--no-check", default=None, help="Run FILE with onnxruntime afterwards, if it is installed.")
def export(**options: Any) -> None:
    """Write a model of CHECKPOINT to a file for other programs.

    CHECKPOINT was written by run.save, under any strategy.
    """
    from paceline.export import export_command

    try:
        export_command.export(export_command.ExportOptions(**options))
    except SettingError as error:
        raise click.UsageError(printable(str(error))) from None
    except PacelineError as error:
        raise click.ClickException(printable(str(error))) from None


@main.command(example="paceline check checkpoints model.safetensors")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path())
@click.pass_context
def check(context: click.Context, paths: tuple[str, ...]) -> None:
    """Check that checkpoints and exported files are undamaged.

    PATH is a directory given to run.save, one checkpoint in it, or an exported file with its FILE.sha256 beside it.
    Exit code 1: a file is damaged.
    """
    from paceline.export import check_command

    try:
        context.exit(check_command.check(paths))
    except PacelineError as error:
        raise click.ClickException(printable(str(error))) from None


@main.command(example="paceline env")
def env() -> None:
    """Print the versions, devices, backends and environment variables that a bug report needs."""
    from paceline.launcher.environment_report import environment_report

    click.echo(printable(environment_report()), nl=False)

"""The command line. Commands hold no logic; nothing here imports torch."""

from __future__ import annotations

import click

from paceline import __version__, launcher
from paceline.errors import PacelineError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="paceline")
def main() -> None:
    """One training script. Any number of devices. The same model."""


@main.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--nproc",
    "--nproc-per-node",
    "--nproc_per_node",
    default="1",
    show_default=True,
    metavar="N",
    help="Number of processes on this machine: a number, or gpu, cpu, auto.",
)
@click.option("--strategy", metavar="NAME[:KEY=VALUE,...]", help="How devices share the work, e.g. ddp.")
@click.option("--precision", metavar="NAME", help="fp32, bf16, fp16 or bf16-params.")
@click.option("--seed", type=int, metavar="N", help="Seed of the data order and of the models' randomness.")
@click.option("--batch-norm", metavar="NAME", help="global: statistics of the global batch; shard: of each shard.")
@click.option("--compile/--no-compile", default=None, help="Compile the models with torch.compile.")
@click.option("--nonfinite", metavar="NAME", help="What an inf or NaN gradient does: stop or skip.")
@click.option("--standalone", is_flag=True, hidden=True)  # in many torchrun command lines; one machine is what we do
@click.argument("script", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    context: click.Context, nproc: str, script: str, args: tuple[str, ...], standalone: bool, **settings: object
) -> None:
    """Run SCRIPT in N processes of this machine.

    The settings override those in the script. All that follows SCRIPT is passed on to it, untouched.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        context.exit(launcher.run(script, args, nproc=nproc, settings=given))
    except PacelineError as error:
        raise click.UsageError(str(error)) from None

"""The main paths of tensor and pipeline on four processes, two rows of two; all of them are in the conformance run."""

from __future__ import annotations

from tests.ranks import checks_in, run_checks
from tests.strategies import pipeline_more_checks, tensor_checks
from tests.strategies.checks import layers, plainly
from tests.strategies.tensor_checks import Transformer, counted, counted_by_hand, loss_fn, same


def check_tensor() -> None:
    ours = tensor_checks.trained(Transformer, loss_fn, "tensor:size=2", adam=True, micro=1, loop=True, clip=1e9)
    same(ours, plainly(Transformer, loss_fn, adam=True), 1e-8)
    same(tensor_checks.trained(Transformer, counted, "tensor:size=2"), plainly(Transformer, counted_by_hand))


def check_pipeline() -> None:
    trained, loss, by_hand = (
        pipeline_more_checks.trained,
        pipeline_more_checks.two_counts,
        pipeline_more_checks.two_counts_by_hand,
    )
    for schedule in ("gpipe", "1f1b"):
        ours = trained(layers, loss, f"pipeline:stages=2,schedule={schedule}", adam=True, micro=1)
        same(ours, plainly(layers, by_hand, adam=True), 1e-8)


def run_both() -> dict[str, str]:
    """All checks of both strategies."""
    return run_checks(checks_in(vars(tensor_checks)) + checks_in(vars(pipeline_more_checks)))


SLOW = {
    "check_16_bits",
    "check_optimizers_see_the_whole_parameter",
    "check_cuts",
    "check_counts",
    "check_a_plan",
    "check_clipping_and_values_that_are_not_finite",
}


def run_daily() -> dict[str, str]:
    """All but what takes long, which the conformance run has."""
    checks = checks_in(vars(tensor_checks)) + checks_in(vars(pipeline_more_checks))
    return run_checks([check for check in checks if check.__name__ not in SLOW])


def run_all() -> dict[str, str]:
    return run_checks(
        [
            check_tensor,
            check_pipeline,
            tensor_checks.check_evaluation_counts_each_example_once,
            pipeline_more_checks.check_batch_norm_over_several_pipelines,
        ]
    )

"""Which parameters a backward call uses, for strategies that sum gradients themselves after the backward; and whether
the copies of parameters are the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.comm.mesh import Group
from paceline.errors import ModelError, UnusedParameterError
from paceline.strategies.base import Kind
from paceline.strategies.kit.named_parameters import listed


class UsedParameters:
    """The parameters that each backward call gives a gradient.

    Processes compare them when a call is made for the first time. Where they are the same, the call must use the same
    ones from then on. Where they differ, processes compare them at each step.
    """

    def __init__(self, strategy: str, rank: int) -> None:
        self._strategy, self._rank = strategy, rank
        self._expected: dict[Kind, tuple[bool, ...] | None] = {}  # of each call; None: compared at each step
        self._flags: tuple[bool, ...] = ()  # requires_grad of each parameter

    @property
    def untouched(self) -> bool:
        """Whether no call was compared yet."""
        return not self._flags

    def clear(self) -> None:
        self._expected, self._flags = {}, ()

    def gradients(self, call: Kind, names: Mapping[Tensor, str], group: Group) -> list[Tensor]:
        """The gradients of this call, of the same parameters on all processes of the group: where others used a
        parameter and this process did not, zeros. Raises UnusedParameterError where the call uses others than
        before."""
        flags = tuple(p.requires_grad for p in names)
        if flags != self._flags:  # frozen or unfrozen between steps, alike on all processes
            self._expected, self._flags = {}, flags
        mine = tuple(p.grad is not None for p in names)
        expected = self._expected.get(call)
        if expected is None:
            for name in (name for p, name in names.items() if p.grad is not None and p.grad.is_sparse):
                raise ModelError(
                    f"strategy {self._strategy}: {name} has a sparse gradient. Make its Embedding with sparse=False, "
                    "or, on CPUs, use strategy='ddp' (NCCL adds no sparse gradients)."
                )
            everyone = collectives.gather_objects(mine, group)
            expected = tuple(map(any, zip(*everyone, strict=True)))
            self._expected[call] = expected if all(other == expected for other in everyone) else None
            for p, there in zip(names, expected, strict=True):
                if there and p.grad is None:
                    p.grad = torch.zeros_like(p)
        elif mine != expected:
            changed = [name for name, a, b in zip(names.values(), mine, expected, strict=True) if a != b]
            raise UnusedParameterError(
                f"rank {self._rank}: backward call number {call[0] + 1} of this step reaches other parameters than it "
                f"did before ({listed(changed)}), and the other ranks cannot know. With strategy "
                f"{self._strategy} the path through the model must not change from step to step; name the "
                "optimizer where losses take turns: run.backward(loss, optimizer=...)."
            )
        return [p.grad for p in names if p.grad is not None]


def check_copies(
    local: Sequence[tuple[str, Tensor]],
    data: Group,
    whole: Sequence[tuple[str, Tensor]],
    when: str,
) -> None:
    """Raises ModelError, on all processes, where the `local` parts of parameters are not the same bits on the processes
    of the data group, or the `whole` ones on all."""
    differing = collectives.digest_mismatch(local, data)
    differing = [*differing, *collectives.digest_mismatch(whole)]
    names = list(dict.fromkeys(name for own in collectives.gather_objects(differing) for name in own))
    if names:
        raise ModelError(
            f"the weights differ between ranks {when}: {listed(names)}. `prepare` and each update make them "
            "the same, so that something changed them on some ranks only: load weights on every rank, or before "
            "`prepare`, and make each run.backward and run.step on all."
        )

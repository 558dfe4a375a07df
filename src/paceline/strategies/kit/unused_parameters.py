"""Find the parameters that a backward call uses, for strategies that sum gradients after the backward.

Also check whether copies of parameters are bit-identical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm import same_bits
from paceline.comm.group import Group
from paceline.comm.mesh import world_group
from paceline.errors import ModelError, UnusedParameterError
from paceline.strategies.base import Kind
from paceline.strategies.kit.named_parameters import listed


class UsedParameters:
    """The parameters that receive a gradient in each backward call.

    At the first call of a kind, the processes compare the parameters that it uses. If all processes use the same
    parameters, later calls of this kind must also use these parameters. Otherwise the processes compare at each step.
    """

    def __init__(self, strategy: str, rank: int) -> None:
        self._strategy, self._rank = strategy, rank
        self._expected: dict[Kind, tuple[bool, ...] | None] = {}  # None: compare at each step
        self._flags: tuple[bool, ...] = ()  # requires_grad of each parameter

    @property
    def untouched(self) -> bool:
        """Whether no call has been compared yet."""
        return not self._flags

    def clear(self) -> None:
        self._expected, self._flags = {}, ()

    def gradients(self, call: Kind, names: Mapping[Tensor, str], group: Group) -> list[Tensor]:
        """The gradients of this call, for the same parameters on all processes of the group.

        If only other processes used a parameter, its gradient here is zeros. Raises UnusedParameterError if the call
        uses different parameters than before.
        """
        flags = tuple(p.requires_grad for p in names)
        if flags != self._flags:  # parameters were frozen or unfrozen since the last call, on all processes
            self._expected, self._flags = {}, flags
        mine = tuple(p.grad is not None for p in names)
        expected = self._expected.get(call)
        if expected is None:
            for name in (name for p, name in names.items() if p.grad is not None and p.grad.is_sparse):
                raise ModelError(
                    f"strategy {self._strategy}: {name} has a sparse gradient. Build its Embedding with sparse=False, "
                    "or, on CPUs, use strategy='ddp' (NCCL cannot add sparse gradients)."
                )
            everyone = group.gather(mine)
            expected = tuple(map(any, zip(*everyone, strict=True)))
            self._expected[call] = expected if all(other == expected for other in everyone) else None
            for p, there in zip(names, expected, strict=True):
                if there and p.grad is None:
                    p.grad = torch.zeros_like(p)
        elif mine != expected:
            changed = [name for name, a, b in zip(names.values(), mine, expected, strict=True) if a != b]
            raise UnusedParameterError(
                f"rank {self._rank}: backward call number {call[0] + 1} of this step uses different parameters than "
                f"in earlier steps ({listed(changed)}), and the other ranks cannot detect that. With strategy "
                f"{self._strategy} the path through the model must be the same in every step. If several losses "
                "alternate, name the optimizer: run.backward(loss, optimizer=...)."
            )
        return [p.grad for p in names if p.grad is not None]


def check_copies(
    local: Sequence[tuple[str, Tensor]],
    data: Group,
    whole: Sequence[tuple[str, Tensor]],
    when: str,
) -> None:
    """Raises ModelError, on all processes, if copies of parameters are not bit-identical.

    local: parts of parameters, compared over the data group. whole: parameters, compared over all processes.
    """
    differing = same_bits.digest_mismatch(local, data)
    differing = [*differing, *same_bits.digest_mismatch(whole, world_group())]
    names = list(dict.fromkeys(name for own in world_group().gather(differing) for name in own))
    if names:
        raise ModelError(
            f"the weights differ between ranks {when}: {listed(names)}. `prepare` and each update make them "
            "the same, so something changed them on some ranks only. Load weights on every rank, or before "
            "`prepare`, and call run.backward and run.step on all ranks."
        )

"""Which parameters a backward call reaches, where strategies sum gradients themselves after the backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.comm.mesh import Group
from paceline.errors import ModelError, UnusedParameterError
from paceline.strategies.base import Kind


class Reached:
    """The processes of `group` compare what a call reaches when it is made for the first time; from
    then on it must be that. Where they differ then, they compare each time."""

    def __init__(self, strategy: str, rank: int) -> None:
        self._strategy, self._rank = strategy, rank
        self._expected: dict[Kind, tuple[bool, ...] | None] = {}
        self._flags: tuple[bool, ...] = ()

    @property
    def fresh(self) -> bool:
        """Whether nothing was compared yet."""
        return not self._flags

    def clear(self) -> None:
        self._expected, self._flags = {}, ()

    def gradients(self, call: Kind, names: Mapping[Tensor, str], group: Group) -> list[Tensor]:
        """The gradients of this call, of the same parameters on all processes: one that did not reach what others did
        has zeros. Raises UnusedParameterError where they changed."""
        flags = tuple(p.requires_grad for p in names)
        if flags != self._flags:  # frozen or unfrozen between steps, alike on all processes
            self._expected, self._flags = {}, flags
        mine = tuple(p.grad is not None for p in names)
        expected = self._expected.get(call)
        if expected is None:
            self._check_dense(names)
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
                f"did before ({', '.join(changed[:5])}), and the other ranks cannot know. With strategy "
                f"{self._strategy} the path through the model must not change from step to step; name the "
                "optimizer where losses take turns: run.backward(loss, optimizer=...)."
            )
        return [p.grad for p in names if p.grad is not None]

    def _check_dense(self, names: Mapping[Tensor, str]) -> None:
        for p, name in names.items():
            if p.grad is not None and p.grad.is_sparse:
                raise ModelError(
                    f"strategy {self._strategy}: {name} has a sparse gradient. Make its Embedding with sparse=False, "
                    "or use strategy='ddp'."
                )


def check_alike(
    parts: Sequence[tuple[str, Tensor]],
    data: Group,
    whole: Sequence[tuple[str, Tensor]],
    when: str,
) -> None:
    """Raises ModelError, on all processes, where `parts` are not the same bits on the processes that have other
    examples, or `whole` ones on all."""
    differing = collectives.digest_mismatch(parts, data)
    differing = [*differing, *collectives.digest_mismatch(whole)]
    names = list(dict.fromkeys(name for own in collectives.gather_objects(differing) for name in own))
    if names:
        raise ModelError(
            f"the weights differ between ranks {when}: {', '.join(names[:5])}. `prepare` and each update make them "
            "the same, so that something changed them on some ranks only: load weights on every rank, or before "
            "`prepare`, and make each run.backward and run.step on all."
        )


def named_state(names: Mapping[Tensor, str], optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[str, Tensor]]:
    """The parameters, and the tensors of their optimizers' state, each with a name."""
    named = [(name, p) for p, name in names.items()]
    for number, optimizer in enumerate(optimizers):
        for p, state in optimizer.state.items():
            what = f"{names.get(p, '?')} in optimizer {number}"
            named += [(f"{key} of {what}", v) for key, v in sorted(state.items()) if isinstance(v, Tensor)]
    return named

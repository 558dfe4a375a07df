"""The acceptance suite notices when Paceline is broken: each deliberate breakage of a copy of the source makes it fail.

The suite itself runs on the unbroken source beside this; here only what is selected for a breakage runs on the copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.walkthrough.strategies import WAYS

ROOT = Path(__file__).resolve().parents[1]
WALKTHROUGH = "tests/walkthrough/test_walkthrough.py"


class Breakage(NamedTuple):
    file: str
    right: str
    wrong: str
    notices: str
    tests: str = WALKTHROUGH


BREAKAGES = {
    "halved gradient": Breakage(
        "step/step.py",
        "request.examples / request.mean_over * (scale",
        "request.examples / request.mean_over / 2 * (scale",
        "a-sgd-whole-closure-w1",
    ),
    "an empty shard counted as one example": Breakage(
        "data/batch_plan.py",
        "return Layout(yields, self.mean_over(total, weights), micro_batches, weights)",
        "return Layout(yields, self.mean_over(max(total, self.shards), weights), micro_batches, weights)",
        "e-small_bn-sgd-whole-closure-w3",
    ),
    "an example in two shards": Breakage(
        "data/batch_plan.py",
        "piece: Any = batch[low:high]",
        "piece: Any = batch[max(low - 1, 0) : high]",
        "a-sgd-whole and w2",
    ),
    "batch norm by shard where global is asked for": Breakage(
        "norm/normalisation.py", "            batchnorm.convert(model)\n", "            pass\n", "a-sgd-whole and w2"
    ),
    "biased running variance": Breakage("norm/batchnorm.py", "var * (once / (once - 1))", "var", "a-sgd-whole and w2"),
    "every epoch in the order of the first": Breakage(
        "data/randomness.py", "tag(name), epoch))", "tag(name), 0))", "a-sgd-whole-closure-w1"
    ),
    "momentum lost at resume": Breakage(
        "strategies/kit/named_parameters.py",
        'optimizer.load_state_dict({"state": state, "param_groups": groups})',
        'optimizer.load_state_dict({"state": {}, "param_groups": groups})',
        "f-other-sgd-whole-closure-w3",
    ),
    "resumed one step too early": Breakage(
        "data/loader.py", "self.current.step + int(self.stepped)", "self.current.step", "f-other-sgd-whole-closure-w3"
    ),
    "last micro-batch not reduced": Breakage(
        "strategies/replicated/ddp.py",
        "        if not work.final or self.world.size == 1:\n            backward_here(work)\n",
        "        if True:\n            backward_here(work)\n            return\n",
        "g-sgd-micro2 and w2",
    ),
    "tokens counted on this process only": Breakage(
        "step/accounts.py",
        "self._mesh.gradient.all_reduce(self._vector(keys))",
        "self._vector(keys)",
        "b-mlm-sgd-whole-loop-w2",
    ),
    "clipping forgotten": Breakage(
        "step/updates.py", "if norm is not None and max_grad_norm is not None:", "if False:", "b-mlm-sgd-whole-loop-w2"
    ),
    "schedule not moved": Breakage(
        "step/updates.py", "            self._guards.allow(scheduler.step)\n", "            pass\n", "a-sgd and w1"
    ),
    "the same noise on every shard": Breakage(
        "data/loader.py",
        "request.step, part.shard, part.micro, self._device",
        "request.step, 0, 0, self._device",
        "yield",
        "tests/data/test_loader.py",
    ),
    "the same masks on every shard": Breakage(
        "data/collating.py",
        "np.asarray(part.indices, dtype=np.int64))",
        "np.arange(len(part.indices)))",
        "draws_the_same_however",
        "tests/data/test_collating.py",
    ),
    "shards added in the order in which they came": Breakage(
        "comm/tree_sums.py",
        "        total = complete(root, sums, torch.add)\n",
        "        total = torch.stack(list(sums.values())).sum(0)\n",
        "one_hash_on_three",
        "tests/reproducible/test_reproducible.py",
    ),
    "batch norm's sums added by process first": Breakage(
        "comm/tree_sums.py",
        "        first = tensors[0]\n        return self._sums.numbers(",
        "        first = tensors[0]\n"
        "        tensors = [torch.stack(list(tensors)).sum(0), *[torch.zeros_like(first)] * (len(tensors) - 1)]\n"
        "        return self._sums.numbers(",
        "one_hash_on_three",
        "tests/reproducible/test_reproducible.py",
    ),
    "dropout that goes on from shard to shard": Breakage(
        "comm/threads.py",
        "            generators.set_state(self._generator_states[rank], self._devices[rank])\n",
        "            pass\n",
        "one_hash_on_three",
        "tests/reproducible/test_reproducible.py",
    ),
    "running statistics that go on from shard to shard": Breakage(
        "norm/normalisation.py",
        "            buffer.copy_(start)\n",
        "            pass\n",
        "one_hash_on_three or processes_of_their_own",
        "tests/reproducible/test_reproducible.py",
    ),
    "what each process does to its weights is done to those of all": Breakage(
        "comm/shared_memory.py",
        "flags=mmap.MAP_PRIVATE)",
        "flags=mmap.MAP_SHARED)",
        "does_to_weights",
        "tests/strategies/test_shared.py",
    ),
    "what all processes do to their weights is lost": Breakage(
        "strategies/replicated/shared.py",
        "        self._follow()  # (3)\n",
        "        self._arena.meetings.wait()\n",
        "does_to_weights",
        "tests/strategies/test_shared.py",
    ),
    "tracked objects not put back": Breakage(
        "state/state.py",
        '            self.tracked[name].load_state_dict(self._waiting["tracked"].pop(name))\n',
        "            pass\n",
        "f-exact-sgd-whole-loop-w2",
    ),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_the_line_to_break_is_there(name: str) -> None:
    """So that a change of the source is told here, and not by the fuller matrices alone."""
    breakage = BREAKAGES[name]
    assert (ROOT / "src" / "paceline" / breakage.file).read_text().count(breakage.right) == 1, "adapt BREAKAGES"


def marks(number: int) -> pytest.MarkDecorator:
    """.ci/run has every seventh."""
    return pytest.mark.full if number % 7 else pytest.mark.conformance


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(number)) for number, name in enumerate(BREAKAGES)])
def test_is_noticed(name: str, tmp_path: Path) -> None:
    breakage = BREAKAGES[name]
    copy = tmp_path / "src" / "paceline"
    shutil.copytree(ROOT / "src" / "paceline", copy)
    source = (copy / breakage.file).read_text()
    assert breakage.right in source
    (copy / breakage.file).write_text(source.replace(breakage.right, breakage.wrong))
    chosen = breakage.notices
    if breakage.tests == WALKTHROUGH:  # with the strategies that scripts get by themselves
        chosen = f"({chosen}) and not ({' or '.join(WAYS)})"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", breakage.tests, "-k", chosen]
    command += ["-o", "addopts=", "--timeout", "500"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "src"), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=550, check=False)
    closing = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 1, f"nothing failed: {closing}\n{done.stderr[-2000:]}"
    assert re.search(r"[1-9]\d* failed", closing), closing

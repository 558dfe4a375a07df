"""What gloo's threads may still hold is kept until they have let go of it. (That forks then never hang is a matter of
thousands of them; here is the mechanism.)"""

from __future__ import annotations

import threading
import time

import torch

from paceline.comm import fork_safety


def test_a_tensor_is_kept_while_somebody_else_holds_it() -> None:
    sent = torch.zeros(3)
    held = sent.view(3)  # a view holds its base
    fork_safety.keep(sent)
    kept = [tensor for tensor in fork_safety._kept if tensor is sent]
    assert len(kept) == 1
    del held, kept
    fork_safety.keep()
    assert not any(tensor is sent for tensor in fork_safety._kept)


def test_a_large_one_is_waited_for_and_not_kept() -> None:
    sent = torch.zeros(fork_safety._LARGE + 1)
    view = [sent.view(-1)]
    threading.Timer(0.005, view.clear).start()
    began = time.monotonic()
    fork_safety.keep(sent)
    assert not view or time.monotonic() - began >= fork_safety._WAIT_SECONDS
    assert not any(tensor is sent for tensor in fork_safety._kept)

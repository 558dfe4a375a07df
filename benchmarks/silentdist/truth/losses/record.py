"""Runs a script under torchrun and keeps, per optimizer step, the weights before it and the gradient it used.

torchrun --nproc-per-node 2 record.py SCRIPT OUT_DIR
"""
import os
import runpy
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

script, out = sys.argv[1], sys.argv[2]
steps, open_steps, alive = [], {}, []


def whole(t):
    t = t.detach()
    if hasattr(t, "full_tensor"):
        t = t.full_tensor()
    return t.clone()


def params(opt):
    return [p for group in opt.param_groups for p in group["params"]]


def before(opt, args, kwargs):
    open_steps[id(opt)] = [whole(p) for p in params(opt)]


def after(opt, args, kwargs):
    grads = [torch.zeros_like(whole(p)) if p.grad is None else whole(p.grad) for p in params(opt)]
    steps.append({"opt": id(opt), "weights": open_steps.pop(id(opt)), "grads": grads,
                  "next": [whole(p) for p in params(opt)]})


ddp_init = torch.nn.parallel.DistributedDataParallel.__init__


def remember(self, *args, **kwargs):
    # keeps the reducer until the process ends: a gloo group that dies while its threads need the GIL can hang
    alive.append(self)
    ddp_init(self, *args, **kwargs)


torch.nn.parallel.DistributedDataParallel.__init__ = remember
register_optimizer_step_pre_hook(before)
register_optimizer_step_post_hook(after)
sys.argv = [script]
sys.path.insert(0, os.path.dirname(script))
rank = os.environ.get("RANK", "0")
runpy.run_path(script, run_name="__main__")
torch.save(steps, os.path.join(out, f"rank{rank}.pt"))
sys.stdout.flush()
os._exit(0)

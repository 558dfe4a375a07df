"""Runs one script and keeps the weights, gradients and learning rates of every optimizer step (this rank's shards).

torchrun --nproc-per-node 2 record.py SCRIPT OUT_DIR
"""
import os
import runpy
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

script, out = sys.argv[1:3]
steps, before = [], {}


def local(t):
    t = t.detach()
    return (t.to_local() if hasattr(t, "to_local") else t).clone()


def members(opt):
    return [p for g in opt.param_groups for p in g["params"]]


def pre(opt, args, kwargs):
    before[id(opt)] = ([local(p) for p in members(opt)], [g["lr"] for g in opt.param_groups])


def post(opt, args, kwargs):
    weights, lr = before.pop(id(opt))
    steps.append({"weights": weights, "lr": lr, "next": [local(p) for p in members(opt)],
                  "grads": [None if p.grad is None else local(p.grad) for p in members(opt)]})


register_optimizer_step_pre_hook(pre)
register_optimizer_step_post_hook(post)
sys.argv = [script]
sys.path.insert(0, os.path.dirname(script))
rank = os.environ["RANK"]
runpy.run_path(script, run_name="__main__")
torch.save({"steps": steps}, os.path.join(out, f"rank{rank}.pt"))

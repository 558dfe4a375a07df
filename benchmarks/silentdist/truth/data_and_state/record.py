"""Runs one script of this folder and keeps what the optimizers and the model saw.

torchrun --nproc-per-node 2 record.py SCRIPT OUT_DIR
"""
import os
import runpy
import sys

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

script, out = sys.argv[1:3]
log = {"steps": [], "inputs": []}
before, depth = {}, [0]


def full(t):
    t = t.detach()
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()


def members(opt):
    return [p for g in opt.param_groups for p in g["params"]]


def pre(opt, args, kwargs):
    before[id(opt)] = ([full(p) for p in members(opt)], [g["lr"] for g in opt.param_groups])


def post(opt, args, kwargs):
    weights, lr = before.pop(id(opt))
    log["steps"].append({"weights": weights, "lr": lr, "next": [full(p) for p in members(opt)],
                         "grads": [None if p.grad is None else full(p.grad) for p in members(opt)]})


def enter(module, args):
    if depth[0] == 0 and module.training and next(module.parameters(), None) is not None:
        log["inputs"].append([a.detach().clone() for a in tree_leaves(list(args)) if torch.is_tensor(a)])
    depth[0] += 1


def leave(module, args, result):
    depth[0] -= 1


register_optimizer_step_pre_hook(pre)
register_optimizer_step_post_hook(post)
register_module_forward_pre_hook(enter)
register_module_forward_hook(leave)
sys.argv = [script]
sys.path.insert(0, os.path.dirname(script))
rank = os.environ["RANK"]
runpy.run_path(script, run_name="__main__")
torch.save(log, os.path.join(out, f"rank{rank}.pt"))

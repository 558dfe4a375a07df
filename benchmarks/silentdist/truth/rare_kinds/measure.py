"""Measures the cases with rare kinds of faults and writes "truth" into their case.json.

    python measure.py [CASE ...]

As in data_and_state, whose helpers it uses: each script runs twice with two ranks (the two runs must agree bit by
bit), and what a correct run would have done is computed again here in ONE plain process.
"""
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import types

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler

HERE = pathlib.Path(__file__).resolve().parent
spec = importlib.util.spec_from_file_location("data_and_state", HERE.parent / "data_and_state" / "measure.py")
base = importlib.util.module_from_spec(spec)
spec.loader.exec_module(base)
FINAL, GRAD, SCRIPTS = base.FINAL, base.GRAD, base.SCRIPTS
fill, grads, load, worse = base.fill, base.grads, base.load, base.worse
CASES = {}


def case(what):
    def keep(fn):
        CASES[fn.__name__] = (fn, what)
        return fn
    return keep


def run(name, script):
    """Runs a script in its own session; a rank that hangs while gloo shuts down is tried again."""
    for attempt in range(3):
        out = tempfile.mkdtemp()
        cmd = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(HERE / "record.py"), str(SCRIPTS / name / f"{script}.py"), out]
        job = subprocess.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=out,
                               start_new_session=True)
        try:
            stdout, stderr = job.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGTERM)
            stdout, stderr = job.communicate()
        if job.returncode == 0:
            return [torch.load(f"{out}/rank{r}.pt") for r in range(2)], stdout
        print(f"{name}/{script}: attempt {attempt + 1} ended with {job.returncode}\n{stderr[-1500:]}", flush=True)
    raise SystemExit(f"{name}/{script} does not run")


def alone(module):
    """Lets the code of a module that communicates run in this one process."""
    module.dist = types.SimpleNamespace(all_reduce=lambda *a, **k: None, get_rank=lambda: 0, get_world_size=lambda: 1)
    return module


def weights(net):
    return [p.detach() for p in net.parameters()]


def both(loaders):
    """The batches of two ranks, joined step by step."""
    for parts in zip(*loaders):
        if torch.is_tensor(parts[0]):
            yield torch.cat(parts)
        else:
            yield tuple(torch.cat(field) for field in zip(*parts))


def lightning_batches(data, batch, seed, epoch):
    """What Lightning gives two ranks: it puts a shuffling sampler with its global seed into a training loader."""
    loaders = []
    for rank in range(2):
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=seed)
        sampler.set_epoch(epoch)
        loaders.append(DataLoader(data, batch_size=batch, sampler=sampler))
    return both(loaders)


@case(FINAL)
def voice_codebook(m, logs, out):
    net = alone(m).build()
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5)
    for _ in range(2):
        for wave in both([m.loader_of(rank, 2) for rank in range(2)]):
            restored, commitment = net(wave)
            opt.zero_grad()
            (F.mse_loss(restored, wave) + 0.25 * commitment).backward()
            opt.step()
    return worse(logs, "next", -1, weights(net))


@case(GRAD.format(1))
def leaf_channels(m, logs, out):
    net = fill(m.network(), logs[0]["steps"][0]["weights"])
    image, label = next(both([m.loader(rank, 2, 8) for rank in range(2)]))
    return worse(logs, "grads", 0, grads(F.cross_entropy(net(image), label), net.parameters()))


@case(FINAL)
def storm_plateau(m, logs, out):
    net = m.wind_model()
    opt = torch.optim.SGD(net.parameters(), lr=m.LR)
    plateau = ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.02)
    loaders = [m.get_loader(m.towers(128, 10, 0.3), rank, 2, shuffle=True) for rank in range(2)]
    x_valid, y_valid = m.towers(64, 11, 0.3).tensors
    for epoch in range(m.EPOCHS):
        for one in loaders:
            one.sampler.set_epoch(epoch)
        for x, y in both(loaders):
            opt.zero_grad()
            (net(x) - y).square().mean().backward()
            opt.step()
        with torch.no_grad():
            plateau.step((net(x_valid) - y_valid).square().mean().item())
    return worse(logs, "next", -1, weights(net))


@case(FINAL)
def mixture_stop(m, logs, out):
    m.L.seed_everything(14, verbose=False)
    net = m.MaskNet()
    opt = torch.optim.SGD(net.parameters(), lr=net.lr, momentum=0.9)
    best = float("inf")
    for epoch in range(m.EPOCHS):
        for x, y in lightning_batches(m.mixtures(96, 1), m.BATCH, 14, epoch):
            opt.zero_grad()
            F.l1_loss(net.separate(x), y).backward()
            opt.step()
        with torch.no_grad():
            x, y = m.mixtures(48, 2).tensors
            loss = F.l1_loss(net.separate(x), y).item()
        if not loss < best - 1e-3:
            break
        best = loss
    return worse(logs, "next", -1, weights(net))


@case(GRAD.format(9))
def gait_thaw(m, logs, out):
    net = fill(m.build(), logs[0]["steps"][8]["weights"]).requires_grad_(True)
    data = m.Walks()
    data.setup()
    x, y = next(lightning_batches(data.walks, data.batch_size, 21, 1))
    return worse(logs, "grads", 8, grads(F.cross_entropy(net(x), y), net.parameters()))


@case(GRAD.format(1))
def judge_slices(m, logs, out):
    net = fill(m.WindowPolicy(), logs[0]["steps"][0]["weights"])
    ids, advantage, mask = m.rollouts(0, 0)
    kept = advantage[mask].double()
    white = ((advantage - kept.mean()) / (kept.var(correction=0) + 1e-8).sqrt()).float()
    taken = net(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, m.HALO:, None]).squeeze(2)
    return worse(logs, "grads", 0, grads(-(taken * white)[mask].mean(), net.parameters()))


@case(GRAD.format(1))
def chess_heads(m, logs, out):
    net = fill(alone(m).create(), logs[0]["steps"][0]["weights"])
    batch = m.games(0)
    loss = F.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    return worse(logs, "grads", 0, grads(loss, net.parameters()))


@case(GRAD.format(1))
def smoothed_summaries(m, logs, out):
    net = fill(m.tiny_gpt2(), logs[0]["steps"][0]["weights"])
    rows = [m.Summaries()[i] for i in range(24)]
    ids, labels = (torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels"))
    logits = net(input_ids=ids).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=m.SMOOTHING)
    return worse(logs, "grads", 0, grads(loss, net.parameters()))


@case(FINAL)
def half_shards(m, logs, out):
    net = m.make_model()
    opt = torch.optim.SGD(net.parameters(), lr=0.02)
    scale, good = 2.0**17, 0
    for step in range(m.STEPS):
        x, y = (torch.cat(part) for part in zip(*(m.meters(step, rank) for rank in range(2))))
        opt.zero_grad()
        (net(x) - y).square().mean().backward()
        if max(float(p.grad.abs().max()) for p in net.parameters()) * scale > m.HALF_MAX:
            scale, good = scale / 2, 0
            continue
        opt.step()
        good += 1
        if good == 8:
            scale, good = scale * 2, 0
    return max(base.distance(r["steps"][-1]["next"], [p.detach().chunk(2)[rank] for p in net.parameters()])
               for rank, r in enumerate(logs))


@case(GRAD.format(1))
def caption_pairs(m, logs, out):
    net = fill(m.build_encoders(), logs[0]["steps"][0]["weights"])
    image, words = (part[:16] for part in m.albums().tensors)
    a, b = net(image, words)
    place = torch.arange(16)
    loss = (F.cross_entropy(a @ b.t() / 0.1, place) + F.cross_entropy(b @ a.t() / 0.1, place)) / 2
    return worse(logs, "grads", 0, grads(loss, net.parameters()))


@case(GRAD.format(1))
def masked_shards(m, logs, out):
    net = fill(m.new_reader(None), logs[0]["steps"][0]["weights"])
    m.AllParts = types.SimpleNamespace(apply=lambda part, group: part)
    tokens, target, mask = next(iter(m.DataLoader(m.Documents(), batch_size=6)))
    logits = net(tokens, torch.arange(m.LENGTH))
    return worse(logs, "grads", 0, grads(F.cross_entropy(logits[mask > 0], target[mask > 0]), net.parameters()))


@case(FINAL)
def router_nudge(m, logs, out):
    net = m.sparse_model()
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    for step in range(m.UPDATES):
        x, y = (torch.cat(part) for part in zip(*(m.stream(step, rank) for rank in range(2))))
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        net.router.nudge(net.router.chosen.clone())
    return worse(logs, "next", -1, weights(net))


def main():
    for name in sys.argv[1:] or CASES:
        fn, what = CASES[name]
        truth, updates = {"what": what}, []
        for script in ("faulty", "healthy"):
            logs, out = run(name, script)
            again, _ = run(name, script)
            for a, b in zip(logs, again, strict=True):
                assert len(a["steps"]) == len(b["steps"])
                for p, q in zip(a["steps"][-1]["next"], b["steps"][-1]["next"], strict=True):
                    assert torch.equal(p, q), f"{name}/{script}: two runs differ"
            updates.append([len(r["steps"]) for r in logs])
            assert 8 <= max(updates[-1]) <= 40, updates
            value = fn(load(name, script), logs, out)
            truth[script] = value if isinstance(value, int) else float(f"{value:.4g}")
        print(f"{name:20s} faulty {truth['faulty']:<12} healthy {truth['healthy']:<12} updates {updates}", flush=True)
        path = SCRIPTS / name / "case.json"
        info = json.loads(path.read_text()) if path.exists() else {}
        info["truth"] = truth
        path.write_text(json.dumps(info, indent=1) + "\n")


if __name__ == "__main__":
    main()

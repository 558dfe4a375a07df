"""Measures every case of this folder and writes "truth" into its case.json.

    python measure.py [CASE ...]

Each script runs twice with two ranks through record.py (the two runs must agree bit by bit). What a correct run would
have done is computed again here in ONE plain process; the number is how far the script is from that.
"""
import collections
import copy
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types

import torch
import torch.nn.functional as F
from torch import nn

HERE = pathlib.Path(__file__).resolve().parent
SCRIPTS = HERE.parents[1] / "cases"
CASES = {}
GRAD = ("relative L2 distance of the gradient used at update {} (worse of 2 ranks) from the gradient of one plain "
        "process on the union of the same examples and at the same weights")
FINAL = ("relative L2 distance of the final weights (worse of 2 ranks) from those of one plain process on the union of "
         "the same examples")
RATE = "largest difference of the learning rate of an update from the planned one, divided by the planned peak"


def case(what):
    def keep(fn):
        CASES[fn.__name__] = (fn, what)
        return fn
    return keep


def load(name, script):
    spec = importlib.util.spec_from_file_location(f"{name}_{script}", SCRIPTS / name / f"{script}.py")
    mod = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = mod
    spec.loader.exec_module(mod)
    return mod


def run(name, script):
    """With torch 2.13 a rank now and then hangs or aborts while gloo shuts down, after its work is done: try again."""
    for attempt in range(3):
        out = tempfile.mkdtemp()
        cmd = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(HERE / "record.py"), str(SCRIPTS / name / f"{script}.py"), out]
        job = subprocess.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            stdout, stderr = job.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun then ends its workers
            stdout, stderr = job.communicate()
        if job.returncode == 0:
            return [torch.load(f"{out}/rank{r}.pt") for r in range(2)], stdout
        print(f"{name}/{script}: attempt {attempt + 1} ended with {job.returncode}\n{stderr[-1500:]}", flush=True)
    raise SystemExit(f"{name}/{script} does not run")


def distance(got, want):
    num = sum((a.double() - b.double()).square().sum() for a, b in zip(got, want, strict=True))
    return float((num / sum(b.double().square().sum() for b in want)).sqrt())


def grads(loss, params):
    return torch.autograd.grad(loss, list(params))


def fill(module, weights):
    with torch.no_grad():
        for p, w in zip(module.parameters(), weights, strict=True):
            p.copy_(w)
    return module


def worse(logs, key, step, want):
    return max(distance(r["steps"][step][key], want) for r in logs)


def rows(logs, rank=None):
    chosen = logs if rank is None else [logs[rank]]
    return [tuple(row.flatten().tolist()) for r in chosen for batch in r["inputs"] for row in batch[0]]


def rate_error(logs, plan, peak):
    used = [[s["lr"][0] for s in r["steps"]] for r in logs]
    return max(abs(a - b) for u in used for a, b in zip(u, plan, strict=True)) / peak


def number(out, word):
    return float([line for line in out.splitlines() if word in line][-1].split(word)[1].split()[0])


def alone(module):
    """Lets the tensor-parallel code of a module run in this one process."""
    module.dist = types.SimpleNamespace(all_reduce=lambda *a, **k: None, get_rank=lambda: 0)
    return module


@case("number of the 12 training batches that are identical on the two ranks")
def reef_weighted(m, logs, out):
    return sum(torch.equal(a[0], b[0]) for a, b in zip(logs[0]["inputs"], logs[1]["inputs"], strict=True))


@case("number of recordings that are used more than once (160 are read in all)")
def keyword_stream(m, logs, out):
    seen = rows(logs)
    assert len(seen) == 160, len(seen)
    return len(seen) - len(set(seen))


@case("number of the 320 pages of the epoch that no rank trains on")
def pages_stream(m, logs, out):
    pages = torch.cat([m.read_file(f) for f in range(m.FILES)])[:, :-1].tolist()
    return sum((collections.Counter(map(tuple, pages)) - collections.Counter(rows(logs))).values())


@case("number of the 72 speckle fields of rank 1 that rank 0 uses as well")
def speckle_workers(m, logs, out):
    fields = []
    for rank in range(2):
        os.environ["RANK"] = str(rank)
        loader = m.get_loader(rank, 2)
        loader.sampler.set_epoch(0)
        fields.append({tuple(f.flatten().tolist()) for _, _, speckle in loader for f in speckle})
    assert len(fields[1]) == 72
    return len(fields[0] & fields[1])


@case("number of the 120 noise levels of rank 1 that rank 0 draws at the same update (the noise follows them)")
def flow_policy(m, logs, out):
    pairs = [(a[2], b[2]) for a, b in zip(logs[0]["inputs"], logs[1]["inputs"], strict=True)]
    assert sum(len(a) for a, _ in pairs) == 120
    return sum(int((a == b).sum()) for a, b in pairs)


@case("number of the 24 batches after epoch 1 (both ranks) that repeat the batch at the same place of epoch 1")
def grpo_cycle(m, logs, out):
    same = 0
    for r in logs:
        batches = [b[0] for b in r["inputs"]]
        assert len(batches) == 18
        same += sum(torch.equal(batches[i], batches[i % 6]) for i in range(6, 18))
    return same


@case("number of the 160 clips that no rank trains on during the epoch")
def season_clips(m, logs, out):
    everything = {tuple(v[:-1].flatten().tolist()) for v in m.Clips().video}
    return len(everything - set(rows(logs)))


@case("absolute difference of the printed holdout accuracy from the one of a plain process over the 21 studies")
def chest_holdout(m, logs, out):
    net = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 1))
    fill(net, logs[0]["steps"][-1]["next"])
    data = m.Studies("holdout", 21)
    right = ((net(data.x).squeeze(1) > -0.5) == data.y.bool()).float().mean()
    return abs(number(out, "holdout accuracy") - float(right))


@case(FINAL)
def two_tower_gloo(m, logs, out):
    torch.manual_seed(m.SEED)
    net = m.Towers()
    opt = torch.optim.Adagrad(net.parameters(), lr=0.1)
    for step in range(m.STEPS):
        u, i, r = (torch.cat(part) for part in zip(*(m.ratings(step, rank) for rank in range(2))))
        opt.zero_grad()
        (net(u, i) - r).square().mean().backward()
        opt.step()
    return worse(logs, "next", -1, [p.detach() for p in net.parameters()])


@case(RATE)
def subject_tune(m, logs, out):
    opt = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2e-3)
    plan = m.get_cosine_schedule_with_warmup(opt, 4, 16)
    rates = []
    for _ in range(16):
        rates.append(opt.param_groups[0]["lr"])
        opt.step()
        plan.step()
    return rate_error(logs, rates, 2e-3)


@case(RATE)
def retriever_onecycle(m, logs, out):
    opt = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=5e-3)
    plan = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=5e-3, total_steps=16)
    rates = []
    for i in range(16):
        rates.append(opt.param_groups[0]["lr"])
        opt.step()
        if i < 15:
            plan.step()
    return rate_error(logs, rates, 5e-3)


@case(RATE)
def tabular_rate(m, logs, out):
    return rate_error(logs, [0.08] * len(logs[0]["steps"]), 0.08)


@case("relative L2 distance of the first update of the matrices (worse of 2 ranks) from the one of a plain process on "
      "the union of the same examples")
def muon_blocks(m, logs, out):
    torch.manual_seed(0)
    net = m.Decoder()
    ps = list(net.blocks.parameters())
    both = torch.cat([m.sequences(0, rank) for rank in range(2)])
    want = [-0.02 * max(1.0, g.shape[0] / g.shape[1]) ** 0.5 * m.newton_schulz(g)
            for g in grads(m.lm_loss(net, both), ps)]
    first = [r["steps"][0] for r in logs]
    return max(distance([b - a for a, b in zip(s["weights"], s["next"])], want) for s in first)


@case(FINAL)
def momentum_fsdp(m, logs, out):
    net = m.build()
    opt = torch.optim.SGD(m.groups_of(net), lr=0.05, momentum=0.9)
    for i in range(m.ITERATIONS):
        state, target = (torch.cat(part) for part in zip(*(m.transitions(i, rank) for rank in range(2))))
        opt.zero_grad()
        F.smooth_l1_loss(net(state), target).backward()
        opt.step()
    return worse(logs, "next", -1, [p.detach() for p in net.parameters()])


@case(FINAL)
def night_sessions(m, logs, out):
    net = m.Mixer()
    opt = m.OwnedMomentum(net.parameters())
    for step in range(12):
        x, y = (torch.cat(part) for part in zip(*(m.patches(step, rank) for rank in range(2))))
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    return worse(logs, "next", -1, [p.detach() for p in net.parameters()])


@case(GRAD.format(1))
def span_encoder(m, logs, out):
    torch.manual_seed(0)
    net = fill(m.Encoder(), logs[0]["steps"][0]["weights"])
    ids, tags = m.sentences(0, 0)
    loss = F.cross_entropy(net(ids, torch.arange(m.LENGTH)[None]).flatten(0, 1), tags.flatten())
    return worse(logs, "grads", 0, grads(loss, net.parameters()))


@case(GRAD.format(1))
def gene_windows(m, logs, out):
    net = m.new_tagger(gather=lambda t: t)
    bases, tags = m.windows(0)
    loss = F.cross_entropy(net(bases, torch.arange(m.SPAN)[None]).transpose(1, 2), tags)
    return worse(logs, "grads", 0, grads(loss, net.parameters()))


@case(FINAL)
def byol_average(m, logs, out):
    net = m.keypoint_net()
    opt = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
    average = m.MovingAverage(net)
    for step in range(12):
        x, y = (torch.cat(part) for part in zip(*(m.curves(step, rank) for rank in range(2))))
        opt.zero_grad()
        (net(x) - y).abs().mean().backward()
        opt.step()
        if step == 11:  # the recorder keeps the weights right after the optimizer step
            break
        average.update()
    return worse(logs, "next", -1, [p.detach() for p in net.parameters()])


@case("absolute difference of the printed test loss from the one of a plain process whose running statistics follow "
      "the batches of both shards")
def scanner_norms(m, logs, out):
    net = m.lesion_net()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    data = m.scans(60, seed=90)
    buffers = [copy.deepcopy(dict(net.named_buffers())) for _ in range(2)]
    for batches in zip(*(m.shard_loader(data, rank, 2) for rank in range(2))):
        opt.zero_grad()
        for mine, (x, y) in zip(buffers, batches):
            net.load_state_dict(mine, strict=False)
            (F.cross_entropy(net(x), y) / 2).backward()
            mine.update({k: v.clone() for k, v in net.named_buffers()})
        opt.step()
    state = net.state_dict()
    for k in buffers[0]:
        state[k] = (buffers[0][k] + buffers[1][k]) / 2
    return abs(number(out, "test loss") - m.evaluate(state)[0])


@case(GRAD.format(4))
def arm_observations(m, logs, out):
    net = fill(m.Policy(), logs[0]["steps"][3]["weights"])
    moments = m.RunningMoments(m.OBS)
    for step in range(4):
        obs, expert = (torch.cat(part) for part in zip(*(m.rollout(step, rank) for rank in range(2))))
        moments.update(obs)
    loss = (net(moments(obs)) - expert).square().mean()
    return worse(logs, "grads", 3, grads(loss, net.parameters()))


@case(GRAD.format(1))
def ridge_flat(m, logs, out):
    net = m.spectra_net()
    x, y = m.spectra(0, 0, 1)
    loss = (net(x) - y).square().sum(1).mean() + m.PENALTY * m.decay_term(net)
    return worse(logs, "grads", 0, grads(loss, net.parameters()))


def sharded(model, want, logs, cut):
    """Every rank's gradient against its part of the whole gradient; cut(name, tensor, rank) returns the part."""
    found = []
    for rank, r in enumerate(logs):
        parts = [cut(name, g, rank) for (name, _), g in zip(model.named_parameters(), want, strict=True)]
        found.append(distance(r["steps"][0]["grads"], parts))
    return max(found)


@case(GRAD.format(1))
def mlp_columns(m, logs, out):
    net = alone(m).Classifier(0, 1)
    ids, labels = m.texts(0)
    want = grads(F.cross_entropy(net(ids), labels), net.parameters())

    def cut(name, g, rank):
        if ".up" in name:
            return g.chunk(2)[rank]
        return g.chunk(2, dim=1)[rank] if ".down" in name else g
    return sharded(net, want, logs, cut)


@case(GRAD.format(1))
def proj_rows(m, logs, out):
    layers = m.full_layers()
    net = nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())][:-1])
    x = m.windows(0)
    want = grads(F.mse_loss(net(x), x), net.parameters())

    def cut(name, g, rank):
        column = name[0] in "04"
        if name.endswith("weight"):
            return g.chunk(2, dim=0 if column else 1)[rank]
        return g.chunk(2)[rank] if column else g
    return sharded(net, want, logs, cut)


@case(GRAD.format(1))
def router_two(m, logs, out):
    shared, experts = m.SharedPart(2), [m.Expert(0), m.Expert(1)]
    x, y = (torch.cat(part) for part in zip(*(m.tokens(0, rank) for rank in range(2))))
    h = torch.tanh(shared.stem(x))
    weight, choice = shared.gate(h).softmax(-1).max(-1)
    routed = torch.stack([e(h) for e in experts])[choice, torch.arange(len(x))]
    loss = F.cross_entropy(shared.head(h + weight[:, None] * routed), y)
    found = []
    for rank, r in enumerate(logs):
        want = torch.autograd.grad(loss, [*shared.parameters(), *experts[rank].parameters()], retain_graph=True)
        found.append(distance(r["steps"][0]["grads"], want))
    return max(found)


@case(GRAD.format(1))
def long_context(m, logs, out):
    net = m.LongModel()
    ids, target, counted = m.documents(0, 0)
    loss = F.cross_entropy(net(ids)[counted], target[counted])
    return worse(logs, "grads", 0, grads(loss, net.parameters()))


def main():
    for name in sys.argv[1:] or CASES:
        fn, what = CASES[name]
        truth = {"what": what}
        updates = []
        for script in ("faulty", "healthy"):
            logs, out = run(name, script)
            again, _ = run(name, script)
            for a, b in zip(logs, again, strict=True):
                assert len(a["steps"]) == len(b["steps"])
                for p, q in zip(a["steps"][-1]["next"], b["steps"][-1]["next"], strict=True):
                    assert torch.equal(p, q), f"{name}/{script}: two runs differ"
            updates.append(len(logs[0]["steps"]))
            assert 8 <= updates[-1] <= 20, updates
            value = fn(load(name, script), logs, out)
            truth[script] = value if isinstance(value, int) else float(f"{value:.4g}")
        print(f"{name:20s} faulty {truth['faulty']:<12} healthy {truth['healthy']:<12} updates {updates}", flush=True)
        path = SCRIPTS / name / "case.json"
        info = json.loads(path.read_text()) if path.exists() else {}
        info["truth"] = truth
        path.write_text(json.dumps(info, indent=1) + "\n")


if __name__ == "__main__":
    main()

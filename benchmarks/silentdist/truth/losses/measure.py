"""Measures every case of this folder.

    python measure.py [CASE ...]

Each script runs twice under torchrun with two ranks through record.py, which keeps the weights before and
the gradient at every optimizer step. For one chosen update the same gradient is computed again here, in ONE plain
process, from the same weights and on the union of the examples of both ranks. The number is the relative L2 distance
between that gradient and the one a rank used, the worse of the two ranks. Results go to case.json ("truth").
"""
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F

HERE = pathlib.Path(__file__).resolve().parent
SCRIPTS = HERE.parents[1] / "cases"
CASES = {}


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / name / "faulty.py")
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod


def case(update=0, healthy_update=None):
    def keep(fn):
        CASES[fn.__name__] = (fn, update, update if healthy_update is None else healthy_update)
        return fn
    return keep


def fill(params, weights):
    params = list(params)
    assert len(params) == len(weights), (len(params), len(weights))
    with torch.no_grad():
        for p, w in zip(params, weights):
            p.copy_(w)
    return params


def grads(loss, params):
    return list(torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True))


def clip(gs, limit):
    norm = torch.sqrt(sum(g.square().sum() for g in gs))
    return [g * min(1.0, limit / float(norm)) for g in gs]


def nth(iterable, n):
    for i, x in enumerate(iterable):
        if i == n:
            return x


@case()
def bert_mlm_counts(m, w):
    model = m.build_model()
    ps = fill(model.parameters(), w)
    total, count = 0.0, 0
    for rank in range(2):
        loader, sampler = m.make_loader(rank, 2, 8)
        sampler.set_epoch(0)
        b = nth(loader, 0)
        logits = model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits
        picked = b["labels"] != -100
        total = total + F.cross_entropy(logits[picked], b["labels"][picked], reduction="sum")
        count += int(picked.sum())
    return grads(total / count, ps)


@case()
def packed_sft_fsdp2(m, w):
    model = m.build()
    ps = fill(model.parameters(), w)
    both = [next(m.windows(rank, 2)) for rank in range(2)]
    tokens, doc, pos, target = (torch.cat(part) for part in zip(*both))
    logits = model(tokens[:, :-1], doc[:, :-1], pos[:, :-1].clamp(max=m.WINDOW - 1))
    keep = target[:, 1:]
    return grads(F.cross_entropy(logits[keep], tokens[:, 1:][keep]), ps)


@case()
def charlm_micro_means(m, w):
    model = m.build_model()
    ps = fill(model.parameters(), w)
    total, count = 0.0, 0
    for rank in range(2):
        loader = m.loader_for(rank, 2)
        loader.sampler.set_epoch(0)
        for x, y in next(m.chunks(loader, m.config["accumulate"])):
            keep = y != -100
            total = total + F.cross_entropy(model(x)[keep], y[keep], reduction="sum")
            count += int(keep.sum())
    return grads(total / count, ps)


@case(update=2)
def lightning_short_window(m, w):
    net = m.Regressor()
    ps = fill(net.parameters(), w)
    x, y = m.regression_data(2).tensors
    used = []
    for rank in range(2):
        mine = torch.arange(rank, len(x), 2)
        used.append(mine[8 * m.BATCH: 10 * m.BATCH])
    used = torch.cat(used)
    return grads((net.net(x[used]) - y[used]).square().mean(), ps)


@case(update=2, healthy_update=3)
def epoch_leftover_grads(m, w):
    net = m.make_net()
    ps = fill(net.parameters(), w)
    xs, ys = [], []
    for rank in range(2):
        loader = m.make_loader(rank, 2)
        loader.sampler.set_epoch(1)
        for i, (x, y) in enumerate(loader):
            if i < 3:
                xs.append(x), ys.append(y)
    return grads(F.cross_entropy(net(torch.cat(xs)), torch.cat(ys)), ps)


@case()
def drafter_global_mean(m, w):
    head = m.build_head()
    ps = fill(head.parameters(), w)
    both = [m.rollout(0, rank) for rank in range(2)]
    hidden, target, valid = (torch.cat([getattr(b, k) for b in both]) for k in ("hidden", "target", "valid"))
    return grads(F.cross_entropy(head(hidden)[valid], target[valid]), ps)


@case()
def accelerate_loss_scaled(m, w):
    net = m.small_cnn()
    ps = fill(net.parameters(), w)
    x, y = m.blobs().tensors
    n = 2 * m.PER_DEVICE
    return grads(F.cross_entropy(net(x[:n]), y[:n]), ps)


@case()
def moe_aux_every_micro(m, w):
    model = m.make_model()
    ps = fill(model.parameters(), w)
    rows = [b for rank in range(2) for b in m.micro_batches(0, rank)]
    tokens, keep = (torch.cat(part) for part in zip(*rows))
    logits, aux = model(tokens[:, :-1])
    lm = F.cross_entropy(logits[keep], tokens[:, 1:][keep])
    return grads(lm + m.AUX_COEF * aux, ps)


@case()
def moe_local_frequency(m, w):
    model = m.build()
    ps = fill(model.parameters(), w)
    x, y = (torch.cat(part) for part in zip(*(m.domain_batch(0, rank) for rank in range(2))))
    scores = model.router.proj(x).softmax(-1)
    top, index = scores.topk(2, -1)
    gates = torch.zeros_like(scores).scatter(1, index, top / top.sum(-1, keepdim=True))
    out = model.readout(x + sum(gates[:, e, None] * f(x) for e, f in enumerate(model.experts)))
    frequency = torch.bincount(index.flatten(), minlength=6) / index.numel()
    balance = 6 * (frequency * scores.mean(0)).sum()
    return grads(F.cross_entropy(out, y) + 0.1 * balance, ps)


@case()
def trainer_router_aux(m, w):
    model = m.RoutedLM()
    ps = fill(model.parameters(), w)
    data = m.Copies()
    rows = [data[i] for i in range(16)]
    ids, labels = (torch.stack([r[k] for r in rows]) for k in ("input_ids", "labels"))
    logits, aux = model.backbone(ids)
    keep = labels[:, 1:] != -100
    return grads(F.cross_entropy(logits[:, :-1][keep], labels[:, 1:][keep]) + m.ROUTER_WEIGHT * aux, ps)


@case()
def detector_local_boxes(m, w):
    net = m.build_detector()
    ps = fill(net.parameters(), w)
    rows = [nth(m.make_loader(rank, 2), 0) for rank in range(2)]
    images = torch.cat([r[0] for r in rows])
    classes = rows[0][1] + rows[1][1]
    boxes = rows[0][2] + rows[1][2]
    logits, pred = net(images)
    wanted = torch.full(logits.shape[:2], m.CLASSES)
    for k, c in enumerate(classes):
        wanted[k, :len(c)] = c
    got = torch.cat([p[:len(b)] for p, b in zip(pred, boxes)])
    box = (got - torch.cat(boxes)).abs().sum() / sum(len(b) for b in boxes)
    return grads(F.cross_entropy(logits.flatten(0, 1), wanted.flatten()) + 2.0 * box, ps)


@case()
def distill_kl_local_mean(m, w):
    teacher, student = m.teacher_and_student()
    ps = fill(student.parameters(), w)
    ids, labels = (torch.cat(part) for part in zip(*(nth(m.make_loader(rank, 2), 0) for rank in range(2))))
    keep = labels[:, 1:] != -100
    s, t, y = student(ids)[:, :-1][keep], teacher(ids)[:, :-1][keep], labels[:, 1:][keep]
    log_p, log_q = (s / m.TEMPERATURE).log_softmax(-1), (t / m.TEMPERATURE).log_softmax(-1)
    soft = (log_q.exp() * (log_q - log_p)).sum(-1).mean() * m.TEMPERATURE ** 2
    return grads(m.ALPHA * F.cross_entropy(s, y) + (1 - m.ALPHA) * soft, ps)


@case()
def policy_through_module(m, w):
    policy = m.make_policy()
    ps = fill(policy.parameters(), w)
    loss = 0.0
    for rank in range(2):
        goal, g = m.prompts_for(0, rank)
        tokens = m.sample(policy, goal, g)
        advantage, _ = m.advantages(tokens, goal)
        loss = loss + m.policy_loss(policy, tokens, advantage) / 2
    return grads(loss, ps)


@case()
def accelerate_unwrapped_unet(m, w):
    net = m.make_unet()
    ps = fill(net.parameters(), w)
    x, noise, t = (part[:16] for part in m.stripes().tensors)
    return grads(F.mse_loss(net(m.corrupt(x, noise, t), t), noise), ps)


@case()
def bound_compute_loss(m, w):
    net = m.create()
    ps = fill(net.parameters(), w)
    x, y = (torch.cat(part) for part in zip(*(nth(m.stage_loader(0, rank, 2), 0) for rank in range(2))))
    return grads(F.cross_entropy(net.answer(net.encode(x)), y), ps)


@case()
def cosface_weight_outside(m, w):
    backbone, loss_fn = m.make_modules()
    ps = fill([*backbone.parameters(), *loss_fn.parameters()], w)
    x, y = [], []
    for rank in range(2):
        loader = m.make_loader(rank, 2)
        loader.sampler.set_epoch(0)
        a, b = nth(loader, 0)
        x.append(a), y.append(b)
    return grads(loss_fn(backbone(torch.cat(x)), torch.cat(y)), ps)


@case(update=3)
def fabric_free_temperature(m, w):
    scale, tower = m.make_parts()
    ps = fill([scale, *tower.parameters()], w)
    x, y = (part[120:160] for part in m.pairs().tensors)
    return grads(F.cross_entropy(scale.exp() * tower(x) @ m.prototypes().T, y), ps)


@case(update=4)
def head_grown_after_wrap(m, w):
    net = m.new_network()
    net.add_task(1, 3)
    ps = fill(net.parameters(), w)
    x, y = (torch.cat(part) for part in zip(*(nth(m.task_loader(1, 3, rank, 2), 0) for rank in range(2))))
    return grads(F.cross_entropy(net(x, 1), y), ps)


@case()
def rank_skips_bad_micro(m, w):
    net = m.init_net()
    ps = fill(net.parameters(), w)
    rows = [m.recording(0, micro, rank) for micro in range(m.MICRO) for rank in range(2)]
    rows = [(x, y) for x, y in rows if torch.isfinite(y).all()]
    x, y = (torch.cat(part) for part in zip(*rows))
    return grads(F.smooth_l1_loss(net(x), y), ps)


def spike_guard_rank_zero(m, steps=18, lr=0.02):
    """Final weights of one process that leaves a batch out as soon as one of the two halves is a spike."""
    net, guards = m.build(), [m.SpikeGuard(), m.SpikeGuard()]
    ps = list(net.parameters())
    for step in range(steps):
        losses = []
        for rank in range(2):
            now, later = m.states(step, rank)
            losses.append(F.mse_loss(net(now), later))
        if any([guard(loss.item()) for guard, loss in zip(guards, losses)]):
            continue
        step_grads = grads(sum(losses) / 2, ps)
        with torch.no_grad():
            for p, g in zip(ps, step_grads):
                p -= lr * g
    return [p.detach() for p in ps]


@case()
def no_sync_on_last_micro(m, w):
    net = m.get_model()
    ps = fill(net.parameters(), w)
    rows = [m.utterances(i, rank) for i in range(4) for rank in range(2)]
    mel, phones = (torch.cat(part) for part in zip(*rows))
    n = len(mel)
    loss = F.ctc_loss(net(mel).transpose(0, 1), phones, torch.full((n,), m.FRAMES), torch.full((n,), m.TARGET))
    return grads(loss, ps)


@case()
def clip_each_micro_local(m, w):
    net = m.make_vae()
    ps = fill(net.parameters(), w)
    x, eps = (torch.cat(part) for part in zip(*(m.draw(0, i, rank) for i in range(3) for rank in range(2))))
    return clip(grads(m.elbo(net, x, eps), ps), m.CFG["max_norm"])


@case()
def clip_then_allreduce(m, w):
    net = m.create_model()
    ps = fill(net.parameters(), w)
    ids = torch.cat([m.tokens(0, rank) for rank in range(2)])
    loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    return clip(grads(loss, ps), 0.3)


@case()
def fsdp2_shard_norm(m, w):
    net = m.new_tagger()
    ps = fill(net.parameters(), w)
    ids, tags = (torch.cat(part) for part in zip(*(m.corpus(0, rank) for rank in range(2))))
    return clip(grads(F.cross_entropy(net(ids).flatten(0, 1), tags.flatten()), ps), 0.5)


@case()
def ddp_norm_summed_twice(m, w):
    net = m.make()
    ps = fill(net.parameters(), w)
    rows = []
    for rank in range(2):
        loader = m.make_loader(rank, 2)
        loader.sampler.set_epoch(0)
        rows.append(nth(loader, 0))
    u, i, r = (torch.cat(part) for part in zip(*rows))
    return clip(grads((net(u, i) - r).square().mean(), ps), 0.2)


# a fault of one scalar among many weights: only the named part of the gradient is compared
PART = {"fabric_free_temperature": ("of the temperature", slice(0, 1))}
FINAL = {"spike_guard_rank_zero": spike_guard_rank_zero}


def run(name, script):
    out = tempfile.mkdtemp()
    cmd = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
           str(HERE / "record.py"), str(SCRIPTS / name / script), out]
    done = subprocess.run(cmd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return [torch.load(f"{out}/rank{r}.pt") for r in range(2)]


def distance(got, want):
    num = sum((a - b).double().square().sum() for a, b in zip(got, want))
    den = sum(b.double().square().sum() for b in want)
    return float((num / den).sqrt())


def spread(ranks):
    """Largest difference of the final weights between the two ranks."""
    last = [r[-1]["next"] for r in ranks]
    return max(float((a - b).abs().max()) for a, b in zip(*last))


def measure(name):
    if name in FINAL:
        fn, updates = FINAL[name], (-1, -1)
    else:
        fn, *updates = CASES[name]
    module = load(name)
    result = {}
    for script, update in zip(("faulty", "healthy"), updates):
        ranks = run(name, script + ".py")
        again = run(name, script + ".py")
        for a, b in zip(ranks, again):
            for p, q in zip(a[-1]["next"], b[-1]["next"]):
                assert torch.equal(p, q), f"{name}/{script} differs between two runs"
        assert 8 <= len(ranks[0]) <= 20, len(ranks[0])
        if name in FINAL:
            want, key = fn(module), "next"
        else:
            want, key = fn(module, ranks[0][update]["weights"]), "grads"
        part = PART.get(name, ("", slice(None)))[1]
        result[script] = max(distance(r[update][key][part], want[part]) for r in ranks)
        result[script + "_updates"] = len(ranks[0])
        result[script + "_rank_difference"] = spread(ranks)
    return updates[0], result


def main():
    for name in sys.argv[1:] or [*CASES, *FINAL]:
        update, r = measure(name)
        print(f"{name:28s} faulty {r['faulty']:.3e} healthy {r['healthy']:.3e}  rank difference "
              f"{r['faulty_rank_difference']:.1e} {r['healthy_rank_difference']:.1e}  updates "
              f"{r['faulty_updates']} {r['healthy_updates']}", flush=True)
        path = SCRIPTS / name / "case.json"
        info = json.loads(path.read_text())
        info["truth"] = {
            "what": "relative L2 distance of the final weights (worse of 2 ranks) from those of one plain process that "
                    "leaves the same batches out and trains on the union of the other examples"
                    if name in FINAL else
                    f"relative L2 distance of the gradient {(PART[name][0] + ' ') if name in PART else ''}used at update {update + 1} (worse of 2 ranks) from the "
                    "gradient of one plain process on the union of the same examples and at the same weights",
            "faulty": float(f"{r['faulty']:.4g}"), "healthy": float(f"{r['healthy']:.2g}")}
        path.write_text(json.dumps(info, indent=1) + "\n")


if __name__ == "__main__":
    main()

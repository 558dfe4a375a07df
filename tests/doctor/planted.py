# ruff: noqa: E501  (a row of the table stays a row)
"""Which fault is planted how: a healthy script, the lines that are replaced in it, and what doctor must then say.

The healthy twin of every fault is the script as it is, in scripts/.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
HEALTHY = ("imagenet", "by_hand", "finetune", "gan", "gpt", "stream", "on_a_device", "with_paceline",
           "search", "tensor_parallel", "copies", "runner", "masked")  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """name: of the case; cause: what must be found; twin: the healthy script; lines: (its text, the fault's)."""

    name: str
    cause: str
    twin: str
    lines: tuple[tuple[str, str], ...]
    hangs: bool = False  # ranks may wait for each other in vain: it needs the command, which ends it
    fails: bool = False  # torch refuses it in the end, after it was seen

    def source(self) -> str:
        text = (SCRIPTS / f"{self.twin}.py").read_text()
        for old, new in self.lines:
            assert text.count(old) == 1, f"{self.name}: {old!r} stands {text.count(old)} times in {self.twin}.py"
            text = text.replace(old, new)
        return text


def _p(name: str, cause: str, twin: str, *lines: tuple[str, str], hangs: bool = False, fails: bool = False) -> Planted:
    return Planted(name, cause, twin, lines, hangs, fails)


PLANTED = [
    _p("no sampler", "same_examples", "imagenet",
       ("loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)",
        "loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)")),
    _p("no sampler, other seeds", "same_examples", "imagenet",
       ("loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)",
        "loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)"),
       ("torch.manual_seed(7)", "torch.manual_seed(7 + rank)")),
    _p("sampler told one rank", "same_examples", "finetune",
       ("shuffle=True, drop_last=True)", "shuffle=True, drop_last=True, rank=0)")),
    _p("overlapping shards", "same_examples", "by_hand",
       ("(self.rank + 1) * each]", "self.rank * each // 2 + each]"),
       ("order[self.rank * each :", "order[self.rank * each // 2 :")),
    _p("crops from one seed", "same_examples", "gpt", ("seed_offset = ddp_rank", "seed_offset = 0"),
       ("if iteration % 8 == 0 and master_process:", "if iteration % 8 == 0:")),
    _p("stream not cut", "same_examples", "stream",
       ("if number % self.world_size == self.rank:", "if number >= 0:")),
    _p("each rank the first part", "same_examples", "copies",
       ("self.x, self.y = x[rank::world_size], y[rank::world_size]", "self.x, self.y = x[::world_size], y[::world_size]")),
    _p("views of all examples", "same_examples", "imagenet",
       ("        return image, self.labels[index]\n", "        return image + 0.1 * torch.randn(3, 8, 8), torch.randint(10, ())\n"),
       ("loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)",
        "loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)"),
       ("torch.manual_seed(7)", "torch.manual_seed(7 + rank)")),
    _p("a stream of all, in an order of each rank", "same_examples", "stream",
       ("        generator = torch.Generator().manual_seed(0)\n", "        kept, generator = [], torch.Generator().manual_seed(0)\n"),
       ("            if number % self.world_size == self.rank:\n                yield x, x.sum().unsqueeze(0)\n",
        "            kept.append((x, x.sum().unsqueeze(0)))\n            if len(kept) > 4:\n"
        "                yield kept.pop(number * (self.rank + 1) % 5)\n        yield from kept\n")),
    _p("no set_epoch", "no_set_epoch", "imagenet", ("        sampler.set_epoch(epoch)\n", "")),
    _p("padded sums", "padded_evaluation", "imagenet",
       ("test_loader = DataLoader(shard, batch_size=16)",
        "test_loader = DataLoader(test_set, batch_size=16, sampler=DistributedSampler(test_set, shuffle=False))")),
    _p("padded predictions", "padded_evaluation", "stream",
       ("    outputs = outputs[: len(test_set)]\n", ""),
       ("return (outputs - test_set.tensors[1]).square().mean()", "return outputs.square().mean()")),
    _p("a padded list", "padded_evaluation", "runner",
       ("        table = [False] * len(self.test_set)\n", "        table = []\n"),
       ("                table[index] = right\n", "                table.append(right)\n")),
    _p("no mask", "padded_evaluation", "masked",
       ("((model(x).argmax(1) == y) & (places < len(loader.dataset))).sum()", "(model(x).argmax(1) == y).sum()")),
    _p("batch norm without weights", "batch_norm", "imagenet", ("nn.GroupNorm(2, 8)", "nn.BatchNorm2d(8, affine=False)")),
    _p("batch norm of its own", "batch_norm", "imagenet",
       ("        self.norm = nn.GroupNorm(2, 8)\n", "        self.scale = nn.Parameter(torch.ones(8))\n"),
       ("self.norm(self.conv1(x))", "F.batch_norm(self.conv1(x), None, None, self.scale, training=True)")),
    _p("batch norm", "batch_norm", "imagenet", ("nn.GroupNorm(2, 8)", "nn.BatchNorm2d(8)")),
    _p("no broadcast", "weights_differ_at_start", "by_hand",
       ("        dist.broadcast(tensor, src=0)\n", "        tensor.clone()\n")),
    _p("no broadcast of copies", "weights_differ_at_start", "copies", ("            parameter.copy_(copy)\n", "            copy.zero_()\n")),
    _p("changed after DDP", "weights_differ_at_start", "imagenet",
       ("    model = DDP(net)\n", "    model = DDP(net)\n    nn.init.normal_(net.head.weight, std=0.01 * (rank + 1))\n")),
    _p("the module is called past DDP", "weights_differ", "imagenet",
       ("loss = F.cross_entropy(model(images), labels)", "loss = F.cross_entropy(model.module(images), labels)")),
    _p("reduced in part", "weights_differ", "by_hand",
       ("for parameter in model.parameters():", "for parameter in list(model.parameters())[:-1]:")),
    _p("copies of a part", "weights_differ", "copies", ("    due = list(model.parameters())\n", "    due = list(model.parameters())[1:]\n")),
    _p("zeros for an unused layer", "no_gradient", "copies",
       ("    send_parameters(model)\n", "    model.extra, model.forward = nn.Linear(3, 3), lambda x, parts=list(model): nn.Sequential(*parts)(x)\n    send_parameters(model)\n"),
       ("    due = list(model.parameters())\n", "    due = list(model.parameters())\n    for p in due:\n        p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n")),
    _p("the optimizer of another copy", "no_gradient", "imagenet", ("    model = DDP(net)\n", "    model = DDP(__import__('copy').deepcopy(net))\n"), ("SGD(model.parameters()", "SGD(net.parameters()")),
    _p("an unused layer", "no_gradient", "stream",
       ("        self.body = nn.Linear(5, 16)\n", "        self.body = nn.Linear(5, 16)\n        self.extra = nn.Linear(5, 2)\n")),
    _p("DDP fails on an unused layer", "no_gradient", "imagenet",
       ("        self.head = nn.Linear(16, 10)\n", "        self.head = nn.Linear(16, 10)\n        self.aux = nn.Linear(16, 4)\n"),
       fails=True),
    _p("scheduler on rank 0", "lr_differs", "by_hand",
       ("            scheduler.step()\n", "            if rank == 0:\n                scheduler.step()\n")),
    _p("scheduler per process", "scheduler_steps", "imagenet",
       ("        scheduler.step()\n", "        for _ in range(world_size):\n            scheduler.step()\n")),
    _p("scheduler per batch", "scheduler_steps", "imagenet",
       ("def train(model, loader, optimizer, args):", "def train(model, loader, optimizer, args, scheduler):"),
       ("train(model, loader, optimizer, args)\n        acc", "train(model, loader, optimizer, args, scheduler)\n        acc"),
       ("        total += loss.item()", "        scheduler.step()\n        total += loss.item()"),
       ("        scheduler.step()\n        if rank", "        if rank")),
    _p("scheduler per micro-batch", "scheduler_steps", "finetune",
       ("                scheduler.step()\n", ""),
       ("            if last:\n", "            scheduler.step()\n            if last:\n"),
       fails=True),
    _p("a sequence per batch", "scheduler_steps", "masked",
       ("        scheduler.step()\n", ""),
       ("                optimizer.step()\n", "                optimizer.step()\n                scheduler.step()\n")),
    _p("a cosine per micro-batch", "scheduler_steps", "runner",
       ("            self.scheduler.step()\n", ""),
       ("            self.scaler.scale(loss).backward()\n", "            self.scaler.scale(loss).backward()\n            self.scheduler.step()\n")),
    *(_p(f"{name} per batch", "scheduler_steps", "imagenet",
         ("def train(model, loader, optimizer, args):", "def train(model, loader, optimizer, args, scheduler):"),
         ("train(model, loader, optimizer, args)\n        acc", "train(model, loader, optimizer, args, scheduler)\n        acc"),
         ("        total += loss.item()", "        scheduler.step()\n        total += loss.item()"),
         ("        scheduler.step()\n        if rank", "        if rank"),
         ("CosineAnnealingLR(optimizer, T_max=args.epochs)", f"{name}(optimizer, {argument})"))
      for name, argument in (("ExponentialLR", "0.85"), ("CosineAnnealingWarmRestarts", "2"), ("MultiStepLR", "[1, 2], 0.5"))),
    _p("smoothed and not divided", "accumulation", "runner", ("            loss = loss / self.args.accumulate\n", "")),
    _p("not divided", "accumulation", "finetune",
       ("criterion(model(batch), target) / ACCUMULATE", "criterion(model(batch), target)"),
       ("contextlib.nullcontext() if last else model.no_sync()", "contextlib.nullcontext()")),
    _p("clipped before unscaling", "clip_before_unscale", "finetune",
       ("                scaler.unscale_(optimizer)\n", "")),
    _p("clipped before reduction", "clip_before_reduce", "by_hand",
       ("            average_gradients(model, world_size)\n", ""),
       ("            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n",
        "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n"
        "            average_gradients(model, world_size)\n")),
    _p("clipped before copies are reduced", "clip_before_reduce", "copies",
       ("            average_gradients(model)\n", ""),
       ("            nn.utils.clip_grad_norm_(model.parameters(), 0.3)\n", "            nn.utils.clip_grad_norm_(model.parameters(), 0.3)\n            average_gradients(model)\n")),
    _p("metric of a set that was cut", "local_metric", "copies", ("    dist.all_reduce(counts)\n", "")),
    _p("metric of a stream's part", "local_metric", "runner", ("            dist.all_reduce(tensor)\n", "            tensor.clone()\n")),
    _p("metric of a shard", "local_metric", "imagenet", ("    dist.all_reduce(counts)\n", "")),
    _p("metric of a shard, in a file", "local_metric", "imagenet", ("    dist.all_reduce(counts)\n", ""),
       ('print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.3f}")', 'open("log.csv", "a").write(f"{epoch},{accuracy}")')),
    _p("metric of a shard, to stdout", "local_metric", "imagenet", ("    dist.all_reduce(counts)\n", ""),
       ('print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.3f}")', '__import__("sys").stdout.write(f"accuracy {accuracy}")')),
    _p("a call of rank 0", "collectives", "imagenet",
       ("        dist.barrier()\n", "        if rank == 0:\n            dist.all_reduce(torch.ones(3))\n"), hangs=True),
    _p("another order", "collectives", "by_hand",
       ("        mean = loss.detach().clone()\n        dist.all_reduce(mean)\n",
        "        mean = loss.detach().clone()\n        calls = [lambda: dist.all_reduce(mean), lambda: dist.broadcast(mean.clone(), 0)]\n"
        "        for call in calls if rank == 0 else reversed(calls):\n            call()\n"), hangs=True),
    _p("a call of rank 0 before DDP orders its buckets", "collectives", "search",
       (".backward()\n    optimizer.step()\n", ".backward()\n    optimizer.step()\n    if dist.get_rank() == 0:\n        dist.all_reduce(torch.ones(()))\n"), hangs=True),
    _p("one weight is not reduced", "weights_differ", "search",
       ("    return DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))", "    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))"),
       (".backward()\n    optimizer.step()\n", ".backward()\n    for parameter in list(model.parameters())[1:]:\n        if parameter.grad is not None:\n            dist.all_reduce(parameter.grad)\n            parameter.grad /= dist.get_world_size()\n    optimizer.step()\n")),
    _p("epochs of one training alike", "no_set_epoch", "search",
       ("            sampler.set_epoch(epoch)\n            for inputs, labels in loader:\n                step(model, optimizer, inputs, labels)\n            score", "            for inputs, labels in loader:\n                step(model, optimizer, inputs, labels)\n            score")),
    _p("the padding is kept", "padded_evaluation", "search", ("    right = right[:own].sum()", "    right = right.sum()")),
    _p("a score of a shard", "local_metric", "search", ("    dist.all_reduce(right)\n", "")),
    _p("one rank has a batch more", "collectives", "imagenet",
       ("    dist.destroy_process_group()\n", "    if rank == 1:\n        train(model, loader, optimizer, args)\n    dist.destroy_process_group()\n"),
       hangs=True),
    _p("the same size, another order", "collectives", "by_hand",
       ("        dist.all_reduce(mean)\n",
        "        other = torch.ones(())\n        if rank == 0:\n            dist.all_reduce(mean)\n            dist.all_reduce(other)\n"
        "        else:\n            dist.all_reduce(other)\n            dist.all_reduce(mean)\n")),
    _p("gradients in another order", "collectives", "by_hand",
       ("    for parameter in model.parameters():\n", "    weights = list(model.parameters())\n    for parameter in [*weights[:3], *(weights[3:] if dist.get_rank() else weights[:2:-1])]:\n"),
       ("nn.Linear(24, 1))", "nn.Linear(24, 24), nn.Linear(24, 1, bias=False), nn.Linear(1, 24), nn.Linear(24, 1, bias=False))")),
    _p("metrics in another order", "collectives", "stream",
       ("        if rank == 0:\n            print", "        sums = {name: torch.ones(()) for name in ('loss', 'error')}\n"
        "        for name in sorted(sums, reverse=rank == 0):\n            dist.all_reduce(sums[name])\n        if rank == 0:\n            print")),
    _p("rank 0 evaluates its shard", "local_metric", "finetune",
       ("DataLoader(valid_set, batch_size=12)", "DataLoader(valid_set, batch_size=12, sampler=DistributedSampler(valid_set))")),
    _p("no DDP", "weights_differ", "imagenet",
       ("    model = DDP(net)\n", "    model = net\n"), ("model.module.state_dict()", "model.state_dict()")),
    _p("unfrozen after DDP", "weights_differ", "finetune",
       ("    average = copy.deepcopy(model)\n    model = DistributedDataParallel(model)\n",
        "    average = copy.deepcopy(model)\n    model = DistributedDataParallel(model)\n    model.module.embedding.requires_grad_(True)\n")),
    _p("Paceline: a metric of a shard", "local_metric", "with_paceline",
       ("run.ratio(right, count)", "right / count")),
    _p("Paceline: batch norm of a shard", "batch_norm", "with_paceline",
       ('progress="off")', 'progress="off", batch_norm="shard")')),
    _p("Paceline: weights of rank 0", "weights_differ", "with_paceline",
       ("            run.step(optimizer)\n", "            run.step(optimizer)\n            if run.main:\n                model.head.bias.data.add_(0.1)\n")),
    _p("Paceline: a scheduler of rank 0", "lr_differs", "with_paceline",
       ("        scheduler.step()\n", "        if run.main:\n            scheduler.step()\n")),
    _p("Paceline: a scheduler per batch", "scheduler_steps", "with_paceline",
       ("            run.step(optimizer)\n        scheduler.step()\n", "            run.step(optimizer)\n            scheduler.step()\n")),
    _p("Paceline: a call of rank 0", "collectives", "with_paceline",
       ("        accuracy = run.ratio(right, count)\n", "        accuracy = run.ratio(right, count) if run.main else 0\n"), hangs=True),
    _p("Paceline: all ranks save", "same_checkpoint", "with_paceline",
       ("        if run.main:\n", "        torch.save(model.state_dict(), 'checkpoint.pt')\n        if run.main:\n")),
    _p("threads", "threads", "imagenet",
       ('    dist.init_process_group("gloo")\n', '    dist.init_process_group("gloo")\n    torch.set_num_threads(4 * __import__("os").cpu_count())\n'),
       ("        total += loss.item()", "        torch.randn(500, 500) @ torch.randn(500, 500)\n        total += loss.item()")),
    _p("synchronised in every step", "synchronises", "on_a_device",
       ("        optimizer.step()\n", "        optimizer.step()\n        torch.cuda.synchronize()\n")),
    _p("cache emptied in every step", "empty_cache", "on_a_device",
       ("        optimizer.step()\n", "        optimizer.step()\n        torch.cuda.empty_cache()\n")),
    _p("all on the first device", "one_device", "on_a_device", ("stand_in(rank)", "stand_in(0)")),
    _p("slow data, not pinned", "no_pinned_memory", "on_a_device",
       (", num_workers=1, pin_memory=True", ""),
       ("        return self.inputs[index]", "        time.sleep(0.004)\n        return self.inputs[index]")),
    _p("find_unused for nothing", "find_unused", "imagenet", ("DDP(net)", "DDP(net, find_unused_parameters=True)")),
    _p("slow data", "loader_starves", "imagenet",
       ("        image = self.images[index]\n", "        image = self.images[index]\n        __import__('time').sleep(0.002)\n")),
    _p("slow data, no workers", "no_workers", "imagenet",
       ("        image = self.images[index]\n", "        image = self.images[index]\n        __import__('time').sleep(0.002)\n")),
    _p("accumulation sent", "no_no_sync", "finetune",
       ("contextlib.nullcontext() if last else model.no_sync()", "contextlib.nullcontext()")),
    _p("all ranks save", "same_checkpoint", "imagenet",
       ("            if accuracy >= best:\n                torch.save", "        if accuracy >= best:\n            torch.save")),
    _p("module. is saved", "module_prefix", "imagenet", ("model.module.state_dict()", "model.state_dict()")),
    _p("scaled twice", "lr_scaled_twice", "imagenet",
       ("    net = Net()\n", "    net = Net()\n    args.lr *= world_size\n"), ("lr=args.lr,", "lr=args.lr * world_size,")),
    _p("not scaled", "lr_not_scaled", "imagenet"),
]  # fmt: skip

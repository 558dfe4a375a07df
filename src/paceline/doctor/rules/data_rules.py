"""Rules about data: which examples the ranks train on, and the order of the epochs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from paceline.doctor.findings import Finding
from paceline.doctor.rules import script_lines
from paceline.doctor.rules.recorded_run import (
    Event,
    Pass,
    RecordedRun,
    computes_parts,
    finding_at,
    first_of,
    first_of_each,
)

MIN_BITS = 16  # bits of information that must agree: a few labels of two classes may agree by chance
MIN_SHARED = 8  # minimum number of examples that agree for a finding
SHARED_STREAM = 0.8  # fraction of the shorter stream's examples
ONCE = 0.99  # fraction of a rank's rows in a pass that are distinct, if it does not draw with replacement
DRIFT = 0.05  # fraction of the examples that were read again
OVERLAP = 0.2  # fraction of the smaller shard: padding explains less than one batch
MIN_SAME = 3  # steps with the same inputs
MIN_BEGUN = 4  # passes that were abandoned after one batch
MIN_PASSES = 2  # passes that begin with the same random numbers
SHIFTED = 0.5  # fraction of the shorter rank's examples
# Remedies for ranks that read the same examples, if a DistributedSampler does not fit.
_PREPARED = (
    "Pass this DataLoader through accelerator.prepare or fabric.setup_dataloaders too, and iterate over the result."
)
_STREAM = (
    "Shard the stream by rank, in the same order on all ranks: itertools.islice(stream, rank, None, world_size), so "
    "that a rank reads every world_size-th example (datasets: split_dataset_by_node)."
)
_SAMPLER = (
    "Let DistributedSampler find the rank and the number of processes (leave rank and num_replicas out), and give all "
    "ranks the same seed and the same data set in the same order."
)
_READ_ANEW = "In each epoch, call sampler.set_epoch(epoch) if there is a sampler, and iterate over the loader again."
_SPLIT = (
    "Make the same split on all ranks (generator=torch.Generator().manual_seed(0)), or seed with the rank after the "
    "split."
)
_CUT = "Shard the data without overlap, in the same order on all ranks: indices[rank::world_size]."
_ONE_SHARD = "Shard the stream once: in the data set, or by the library that prepares the loader."
_SEED = "Include the rank in the seed of the generator that draws the batches (seed + rank), or shard the data by rank."


def findings(run: RecordedRun) -> list[Finding]:
    """same_examples, examples_missed, same_in_workers, same_random_numbers; and same_batch or no_set_epoch."""
    return [
        *(() if computes_parts(run) else first_of(run, _same_examples, _same_inputs, _same_gradients)),
        *first_of(run, _missed, _dropped),
        *first_of_each(run, _same_in_workers, _same_numbers),
        *first_of(run, _same_batch, _no_set_epoch, _cycled),
    ]


def _same_examples(run: RecordedRun) -> Iterator[Finding]:
    """same_examples: two ranks read the same examples."""
    for loader in sorted(run.training_loaders) if _needs_own_data(run) else ():
        passes = {rank: run.over(loader, rank, trained=True) for rank in run.peers}
        for one, two in combinations((rank for rank in run.peers if passes[rank]), 2):
            evidence = _compare(run, loader, passes[one], passes[two], (one, two))
            if not evidence:
                continue
            used, about = passes[one][0].at, run.about(loader, one)
            made, cut = about.get("at") or used, _sharding_line(run, loader, (one, two))
            seed = script_lines.rank_seed(run) if script_lines.is_drawn_split(cut) else None
            if cut is None and about.get("sampler") != "distributed" and script_lines.prepares(run):
                yield finding_at("same_examples", used, evidence, made, _PREPARED)
            yield finding_at("same_examples", seed or made, evidence, cut, _SPLIT if seed else _sharding_remedy(about))


def _needs_own_data(run: RecordedRun) -> bool:
    """Must the ranks read different examples?"""
    return run.reduces_gradients and not run.model_parallel


def _sharding_remedy(about: dict[str, Any]) -> str:
    """The remedy that fits the loader's data set and sampler. "": a DistributedSampler."""
    if about.get("iterable"):
        return _STREAM
    if about.get("sampler") == "distributed":
        return _SAMPLER
    return _CUT if about.get("cut") is not None else ""


def _sharding_line(run: RecordedRun, loader: str, ranks: tuple[int, int]) -> Any:
    """The line that shards the examples. It makes the Subset if the ranks' Subsets differ; otherwise it takes a stride
    over a stream, or makes the sampler."""
    about = [run.about(loader, rank) for rank in ranks]
    if about[0].get("cut") != about[1].get("cut"):
        return about[0].get("cut_at")
    return script_lines.rank_stride(run) if about[0].get("iterable") else about[0].get("sampler_at")


def _compare(run: RecordedRun, loader: str, mine: list[Pass], others: list[Pass], ranks: tuple[int, int]) -> str:
    """Describe the overlap of two ranks' first passes; "" if it is no fault."""
    who, a, b = f"ranks {ranks[0]} and {ranks[1]}", mine[0], others[0]
    ours, theirs = a.indices, b.indices
    about = run.about(loader, ranks[0])
    if not ours or not theirs:
        return _same_rows(a, b, who) if about.get("iterable") else ""
    first = content(a), content(b)
    shared = set(first[0]) & set(first[1])
    held = [run.about(loader, rank).get("holds") for rank in ranks]
    # A repeating sampler reads each example on several ranks, which augment it differently.
    if about.get("repeats") or not _same_data_set(shared, first, held, mine):
        return ""
    n = min(len(ours), len(theirs))
    if n >= 2 * MIN_SHARED and ours[:n] == theirs[:n]:
        return f"{who} read the same {n} examples in the same order ({about.get('sampler_name')}): {ours[:6]}, ..."
    if about.get("drawn") or len(set(ours)) < len(ours) or len(set(theirs)) < len(theirs):
        return ""  # each rank draws with replacement, or draws some of all examples
    size, both = about.get("size"), set(ours) & set(theirs)
    if about.get("sampler") == "random" and size and len(shared) >= MIN_SHARED:
        return (
            f"each rank shuffles all {size} examples independently (RandomSampler); {who} shared {len(both)} "
            f"of the {n} that they read"
        )
    padding = max(len(y["idx"]) for y in a.yields) * (run.processes - 1)
    if a.complete and b.complete and len(both) > max(OVERLAP * n, min(padding, n // 2)):
        return f"{who} read {len(both)} examples in common, of {len(ours)} and {len(theirs)} in an epoch"
    return ""


def rows_of(one: Pass) -> Iterator[tuple[int, list[int]]]:
    """(index, digests of its row in each tensor of the batch) for each example that was read."""
    for y in one.yields:
        yield from zip(y["idx"], map(list, zip(*y["rows"] or ())))


def content(one: Pass) -> dict[int, list[int]]:
    """index -> digests of its row in each tensor of the batch."""
    return dict(rows_of(one))


def same_content(shared: set[int], a: dict[int, list[int]], b: dict[int, list[int]]) -> bool:
    """Do the shared indices have the same content in at least one tensor (a label, if images are augmented)?
    Otherwise each rank may have a different data set."""
    return bool(_agreeing(shared, a, b)[0])


def _agreeing(shared: set[int], a: dict[int, list[int]], b: dict[int, list[int]]) -> tuple[dict[int, int], list[int]]:
    """(tensor of the batch -> number of its distinct rows, if all shared rows agree; the tensors with rows that
    differ)."""
    agree: dict[int, int] = {}
    differ: list[int] = []
    leaves = min(len(next(iter(a.values()), [])), len(next(iter(b.values()), [])))
    for leaf in range(leaves if len(shared) >= MIN_SHARED else 0):
        ours = [a[i][leaf] for i in sorted(shared)]
        if ours != [b[i][leaf] for i in sorted(shared)]:
            differ.append(leaf)
        elif len(shared) * math.log2(len(set(ours))) >= MIN_BITS:
            agree[leaf] = len(set(ours))
    return agree, differ


def _same_data_set(shared: set[int], contents: Any, held: list[dict[str, int] | None], passes: list[Pass]) -> bool:
    """Do the indices of two ranks mean the same examples?

    If some tensors agree and other tensors do not, there are two explanations. Either the examples are augmented: then
    they also differ between epochs of one rank. Or different shards happen to have their labels in the same order.
    """
    agree, differ = _agreeing(shared, *contents)
    if agree and (not differ or 2 * max(agree.values()) >= len(shared)):
        return True
    same = held[0] == held[1] if held[0] and held[1] else None
    moving = changes_between_epochs(passes, differ)
    if agree:
        return same is not False and moving is not False
    return bool(differ) and same is True and moving is True


def changes_between_epochs(passes: list[Pass], leaves: list[int]) -> bool | None:
    """Do the same examples of one rank look different in a later epoch? None if no example was read again."""
    first = content(passes[0])
    for later in map(content, passes[1:]):
        again = set(first) & set(later)
        if again:
            changed = [i for i in again if any(first[i][leaf] != later[i][leaf] for leaf in leaves)]
            return len(changed) > DRIFT * len(again)
    return None


def _same_rows(a: Pass, b: Pass, who: str) -> str:
    """Describe the overlap of two ranks' passes over an iterable data set; "" if it is no fault. By the digests of the
    rows, the examples are in the same order, perhaps shifted, or are the same by the end of both passes."""
    pairs = [(x["rows"], y["rows"]) for x, y in zip(a.yields, b.yields) if x["rows"] and y["rows"]]
    rows = [digest for x, _ in pairs for digest in x[0]]
    if len(pairs) < 2 or len(set(rows)) < MIN_SHARED:
        return ""
    if all(x[0] == y[0] for x, y in pairs):
        return f"{who} read the same {len(rows)} examples in the same order (compared by content)"
    first, second = a.digests, b.digests
    ours, theirs = set(first), set(second)
    both, least, whole = len(ours & theirs), min(len(ours), len(theirs)), a.complete and b.complete
    common = f"{who} read {both} examples in common, of {len(ours)} and {len(theirs)}"
    if whole and 2 * len(ours) >= len(rows) and least >= 2 * MIN_SHARED and both > SHARED_STREAM * least:
        return f"{common} (compared by content)"
    once = min(len(ours) / len(first), len(theirs) / len(second)) >= ONCE
    if whole and once and both >= 2 * MIN_SHARED and both > OVERLAP * least:
        return f"{common} in an epoch (compared by content), and no example twice"
    return _shifted(first, second, who)


def _shifted(ours: list[int], theirs: list[int], who: str) -> str:
    """Describe two ranks that read the same rows in the same order, one rank behind the other; "" if they do not."""
    places = {digest: place for place, digest in enumerate(theirs) if theirs.count(digest) == 1}
    shifts = Counter(places[digest] - place for place, digest in enumerate(ours) if digest in places)
    shift, count = next(iter(shifts.most_common(1)), (0, 0))
    if count < 2 * MIN_SHARED or count < SHIFTED * min(len(ours), len(theirs)):
        return ""
    return (
        f"{who} read the same {count} examples in the same order (compared by content), but {abs(shift)} examples later"
    )


def _same_inputs(run: RecordedRun) -> Iterator[Finding]:
    """same_examples, for models that get their input without a DataLoader."""
    if run.training_loaders or not _needs_own_data(run):
        return
    per_rank = [[e for e in events if e["digest"]] for events in run.per_peer("forward")]
    inputs = [[str(e["digest"]) for e in events] for events in per_rank]
    steps = min(map(len, inputs))
    if steps < MIN_SAME or len(set(inputs[0])) < MIN_SAME:
        return
    seed, beside = script_lines.shared_seed_and_draw(run)
    at = seed or per_rank[0][0]["at"]
    if all(len(set(now)) == 1 for now in zip(*inputs)):
        evidence = f"all {run.processes} ranks passed the same inputs to the model in each of {steps} forward passes"
        yield finding_at("same_examples", at, evidence, beside, _SEED)
    for (one, a), (two, b) in combinations(zip(run.peers, map(set, inputs)), 2):
        both, least = len(a & b), min(len(a), len(b))
        if both >= MIN_SAME and both >= SHIFTED * least:
            evidence = (
                f"of {least} different inputs that ranks {one} and {two} passed to the model, {both} are bitwise "
                "equal, but at different steps: the ranks read one stream, shifted"
            )
            yield finding_at("same_examples", at, evidence, beside, _SEED)


def _same_gradients(run: RecordedRun) -> Iterator[Finding]:
    """same_examples, by the first hand-written reduction of each step: equal gradients come from equal data."""
    per_rank = [_first_gradients(events) for events in run.ranks]
    steps = min(map(len, per_rank))
    digests = [[e["digest"] for e in events[:steps]] for events in per_rank]
    handwritten = _needs_own_data(run) and not any(run.events(0, "ddp"))
    if not handwritten or len(set(digests[0])) < MIN_SAME or any(t != digests[0] for t in digests) or 0 in digests[0]:
        return
    evidence = f"the gradients of all {run.processes} ranks were bitwise equal before they were reduced, {steps} times"
    seed, beside = script_lines.shared_seed_and_draw(run)
    yield finding_at("same_examples", seed or per_rank[0][0]["at"], evidence, beside, _SEED)


def _first_gradients(events: list[Event]) -> list[Event]:
    """The first reduction of gradients after each backward."""
    found, due = [], False
    for e in events:
        due = due or e["k"] == "backward"
        if due and e["k"] == "coll" and e.get("of") == "grad" and e.get("digest") is not None:
            found.append(e)
            due = False
    return found


def _missed(run: RecordedRun) -> Iterator[Finding]:
    """examples_missed: a sampler expects more ranks than run, or the ranks' strides are too long."""
    whole = run.reduces_gradients and len(run.peers) == run.processes
    for loader in sorted(run.training_loaders) if whole else ():
        about = run.about(loader)
        replicas, size = about.get("replicas") or 0, about.get("size") or 0
        if about.get("sampler") == "distributed" and replicas > run.world_size:
            evidence = f"{about['sampler_name']} shards for {replicas} ranks, but {run.world_size} ranks are running"
            yield finding_at("examples_missed", about["at"], evidence)
        passes = [run.over(loader, rank, trained=True) for rank in run.peers]
        if not all(theirs and theirs[0].indices for theirs in passes):
            continue
        read = [{i for one in theirs for i in one.indices or ()} for theirs in passes]
        stride, residues = _stride(read)
        if stride <= run.world_size or sorted(residues) != list(range(min(residues), min(residues) + run.world_size)):
            continue
        seen = {i for rank in range(run.processes) for i in _read(run, rank, size)}
        missed = [i for i in range(size) if i not in seen and i % stride not in residues]
        if len(missed) >= max(MIN_SHARED, sum(map(len, read)) // 2 // run.world_size):
            evidence = (
                f"each of {run.world_size} ranks reads every {stride}th example; {len(missed)} of {size} are never "
                f"read by any loader: {missed[:6]}, ..."
            )
            yield finding_at("examples_missed", script_lines.rank_stride(run) or about["at"], evidence)


def _dropped(run: RecordedRun) -> Iterator[Finding]:
    """examples_missed: a library shards a stream that is already sharded. Each rank then drops items as those of other
    ranks, but no other rank reads them."""
    per_rank = [[e["row"] for e in events] for events in run.per_peer("item")]
    if len(run.peers) < 2 or min(map(len, per_rank)) < 2 * MIN_SHARED or any(None in rows for rows in per_rank):
        return
    used = [{digest for y in run.events(rank, "yield") if y["rows"] for digest in y["rows"][0]} for rank in run.peers]
    every = set().union(*used)
    lost: list[int] = []
    for rows, own in zip(per_rank, used):
        places = [n for n, row in enumerate(rows) if row in own]
        read = rows[: max(places, default=0)]
        lost.append(sum(row not in every for row in read))
        if len(places) < MIN_SHARED or lost[-1] < max(MIN_SHARED, OVERLAP * len(read)):
            return
    evidence = (
        f"of the {len(per_rank[0])} items that rank 0 read from its stream, {lost[0]} were dropped as other ranks' "
        "items, but no rank trained on them: each rank's stream is a shard already"
    )
    loader = next(iter(sorted(run.training_loaders)), "")
    at = run.about(loader).get("at") or run.line("item")
    yield finding_at("examples_missed", at, evidence, script_lines.rank_stride(run), _ONE_SHARD)


def _stride(read: list[set[int]]) -> tuple[int, set[int]]:
    """(the common stride of every rank's examples, their residues); (0, empty set) if there is none."""
    if any(len(mine) < MIN_SHARED for mine in read):
        return 0, set()
    strides = {math.gcd(*(i - min(mine) for i in mine)) for mine in read}
    stride = max(strides)
    residues = {min(mine) % stride for mine in read}
    return (stride, residues) if len(strides) == 1 and len(residues) == len(read) else (0, set())


def _read(run: RecordedRun, rank: int, size: int) -> set[int]:
    """The examples that a rank reads in data sets of this size, in training or evaluation."""
    same = [one for one in run.passes[rank] if run.about(one.loader, rank).get("size") == size]
    return {i for one in same for i in one.indices or ()}


def _same_in_workers(run: RecordedRun) -> Iterator[Finding]:
    """same_in_workers: each worker of a loader reads the whole stream."""
    for loader in sorted(run.training_loaders):
        about = run.about(loader)
        workers = about.get("workers") or 0
        for one in run.over(loader) if about.get("iterable") and workers > 1 else ():
            times = Counter(digest for y in one.yields if y["rows"] for digest in zip(*y["rows"]))
            often = sum(1 for n in times.values() if n == workers)
            if len(times) >= 2 * MIN_SHARED and often > 0.8 * len(times):
                evidence = (
                    f"of {len(times)} different examples that rank 0 read in a pass, {often} were read {workers} "
                    f"times (compared by content): once by each of {workers} workers"
                )
                yield finding_at("same_in_workers", about["at"], evidence)


def begun_in_workers(run: RecordedRun, rank: int, loader: str) -> dict[str, dict[tuple[int, int], int]]:
    """For each generator that workers used: (number of the training pass, worker) -> state of the generator when the
    worker began."""
    places = {one.n: place for place, one in enumerate(run.over(loader, rank, trained=True))}
    found: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
    for e in (e for e in run.events(rank, "worker") if e["n"] in places):
        for name, state in e["begun"].items():
            found[name][places[e["n"]], e["worker"]] = state
    return found


def _same_numbers(run: RecordedRun) -> Iterator[Finding]:
    """same_random_numbers: a random generator that workers use begins each pass in the same state."""
    for loader in sorted(run.training_loaders):
        per_rank = [begun_in_workers(run, rank, loader) for rank in range(run.processes)]
        for name in per_rank[0]:
            begun = [list(_by_pass(states.get(name, {})).values()) for states in per_rank]
            mine = begun[0]
            if len(mine) < MIN_PASSES or any(states != mine[0] for states in mine):
                continue
            same = all(theirs and theirs[0] == mine[0] for theirs in begun)
            evidence = (
                f"in each of {len(mine)} passes, {name} random generator began in the same state in each of the "
                f"{len(mine[0])} workers of rank 0{' and of every other rank' if same else ''}, and was used"
            )
            made = run.about(loader)["at"]
            yield finding_at("same_random_numbers", script_lines.worker_seed(run) or made, evidence, made)


def _by_pass(states: dict[tuple[int, int], int]) -> dict[int, dict[int, int]]:
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for (place, worker), state in sorted(states.items()):
        found[place][worker] = state
    return found


def _same_batch(run: RecordedRun) -> Iterator[Finding]:
    """same_batch: `next(iter(loader))` at every step always returns the same first batch."""
    for loader in sorted(run.training_loaders):
        passes = run.over(loader)
        first = [p.yields[0]["idx"] or p.yields[0]["rows"] for p in passes if len(p.yields) == 1 and not p.complete]
        same = sum(one == first[0] for one in first)
        if len(first) >= max(MIN_BEGUN, 0.9 * len(passes)) and first[0] and same >= 0.9 * len(first):
            evidence = (
                f"{len(first)} of {len(passes)} passes over the training data were abandoned after their first batch, "
                f"which was the same batch in {same}"
            )
            yield finding_at("same_batch", passes[0].at, evidence)


def _no_set_epoch(run: RecordedRun) -> Iterator[Finding]:
    """no_set_epoch: several passes have the same order, although their sampler has set_epoch."""
    # a loader may be re-created in each epoch, by the same line
    by: dict[tuple[str, frozenset[int]], list[Pass]] = defaultdict(list)
    for one in run.passes[0]:
        if one.loader in run.training_loaders and one.training and one.yields:
            by[one.loader.rpartition(",")[0], _optimizers(run, one)].append(one)
    for passes in by.values():
        about = run.about(passes[0].loader)
        if not about.get("set_epoch") or not about.get("shuffles", True) or len({p.epoch for p in passes}) > 1:
            continue
        by_order: dict[tuple[int, ...], list[Pass]] = defaultdict(list)
        for one in passes:
            by_order[tuple((one.indices or [])[:64])].append(one)
        for order, begun in by_order.items():
            same = [begun[0], *(p for p in begun[1:] if _continues(run, begun[0], p))]
            if len(order) >= MIN_SHARED and len(same) > 1 and list(order) != sorted(order):
                evidence = (
                    f"{len(same)} of {len(passes)} passes over the training data began with the same examples, "
                    f"{list(order[:6])}, ...: {about.get('sampler_name')}'s epoch stayed {same[1].epoch}"
                )
                epochs = {p.epoch for p in run.passes[0] if p.loader in run.training_loaders}
                # If another loader's epoch changes, the call of set_epoch belongs to that loader's sampler.
                called = script_lines.attribute_use(run, "set_epoch") if len(epochs) == 1 else None
                yield finding_at("no_set_epoch", same[1].at, evidence, called or about.get("sampler_at"))


def _cycled(run: RecordedRun) -> Iterator[Finding]:
    """no_set_epoch: the batches of one pass are kept and used again, as by itertools.cycle. Loaders that do not shuffle
    have no finding, because a second pass would have the same order."""
    for loader in sorted(run.training_loaders):
        passes = [p for p in run.passes[0] if p.loader == loader]
        about, since = run.about(loader), run.ranks[0][passes[0].begin :] if passes else []
        unshuffled = about.get("iterable") or about.get("sampler") == "sequential" or not about.get("shuffles", True)
        others = any(e["k"] == "yield" and e["loader"] in run.training_loaders - {loader} for e in since)
        inputs = [e["digest"] for e in since if e["k"] == "forward"]
        if len(passes) != 1 or not passes[0].complete or unshuffled or others:
            continue
        n = len(passes[0].yields)
        later, kept = inputs[n:], len({str(one) for one in inputs[:n]}) > 1
        if n >= MIN_SAME and len(later) >= n and kept and all(one == inputs[i % n] for i, one in enumerate(later)):
            evidence = (
                f"the loader was read once ({n} batches), and then the model got the same batches in the same order "
                f"again, in all {len(later)} later forward passes that were recorded"
            )
            at = script_lines.cycle_call(run) or passes[0].at
            yield finding_at("no_set_epoch", at, evidence, None, _READ_ANEW)


def _optimizers(run: RecordedRun, one: Pass) -> frozenset[int]:
    """The optimizers that step during a pass. Another optimizer trains another model, with its own first epoch."""
    return frozenset(e["opt"] for e in run.ranks[0][one.begin : one.end] if e["k"] == "before")


def _continues(run: RecordedRun, a: Pass, b: Pass) -> bool:
    """Is pass b a later epoch of the training that pass a began? If b has a different loader, a's loader must not be
    used after b begins, and the examples must look the same: one line may create the loaders of several data sets."""
    if a.loader == b.loader:
        return True
    last = max(p.end for p in run.passes[0] if p.loader == a.loader)
    ours, theirs = content(a), content(b)
    return last < b.begin and (not ours or not theirs or same_content(set(ours) & set(theirs), ours, theirs))

"""Batches on the device, and checkpoints that move between devices."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.gpu import jobs
from benchmarks.gpu.check import Place, Steps, check
from torch.utils.data import TensorDataset

import paceline


@check("right", 180)
def batches_arrive_whole(place: Place) -> Steps:
    """With workers and pinned memory, a batch is copied to the device while the next is made.

    If memory were reused too early, sums would differ. Compares integer sums on the device with the host's.
    """
    count, width, batch = (200, 100, 10) if place.small else (4000, 10_000, 40)
    rows = torch.randint(2**20, (count, width), generator=jobs.generator())
    ways: list[tuple[int, Any, str]] = [(0, None, "cpu"), (0, False, "cpu"), (2, True, "cpu"), (2, False, "cpu")]
    ways += [(0, None, str(place.device))] * (place.device.type == "cuda")
    yield f"{count} rows of {8 * width} bytes, loaded in {len(ways)} ways (workers, pin_memory, place of the data)"
    expected = rows.sum(1)
    for workers, pin, where in ways:
        run = paceline.start(device=str(place.device), progress="off")
        options = {} if pin is None else {"pin_memory": pin}
        data = TensorDataset(rows.to(where), torch.arange(count).to(where))
        loader = run.loader(data, global_batch=batch, shuffle=True, num_workers=workers, **options)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run.prepare(model, optimizer)
        sums, numbers, busy = [], [], torch.ones(400 if place.small else 4000, 400, device=place.device)
        for _ in run.epochs(2):
            for values, index in loader:
                busy = busy @ busy[:400] * 1e-3  # the device lags behind the host
                sums.append(values.sum(1))
                numbers.append(index)
                run.backward(model.weight.sum())
                run.step()
        run.close()
        assert values.device == place.device, f"{workers, pin, where}: batches lie on {values.device}"
        got, of = torch.cat(sums).cpu(), torch.cat(numbers).cpu()
        assert torch.equal(got, expected[of]), f"{workers, pin, where}: rows arrived changed"
        assert sorted(of.tolist()) == sorted([*range(count)] * 2), f"{workers, pin, where}: rows were lost"
    yield {"rows": 2 * count * len(ways)}


@check("right", 180)
def checkpoints_go_from_device_to_device(place: Place) -> Steps:
    here, host = str(place.device), "cpu"
    yield "an epoch, a checkpoint and an epoch more: on the device, on the CPU, and from each to the other"
    ends: dict[str, list[Any]] = {}
    for first in (here, host):
        for second in (here, host):
            folder = place.folder / f"{first}-{second}".replace(":", "")
            before = trained(first, 1, folder, save=True)
            after = trained(second, 2, folder, save=False)
            ends[f"{first} > {second}"] = [before, after]
    straight = trained(host, 2, place.folder / "none", save=False)
    start = jobs.CONV.make()
    figures = {name: jobs.apart([after], [straight], start) for name, (_, after) in ends.items()}
    yield {"difference from two epochs on the CPU without a checkpoint": figures}
    assert jobs.same_bits([ends[f"{host} > {host}"][1]], [straight]), "a resumed run on the CPU has other bits"
    assert all(apart < 1e-3 for apart in figures.values()), figures


def loss_fn(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def trained(device: str, epochs: int, folder: Any, save: bool) -> torch.nn.Module:
    """A model after a number of epochs, resumed from the checkpoint in the folder if there is one."""
    run = paceline.start(device=device, progress="off", tf32=False)
    (model,) = jobs.CONV.make()
    optimizer = jobs.OPTIMIZERS["sgd"](model.parameters())
    run.prepare(model, optimizer)
    loader = run.loader(jobs.CONV.data(), global_batch=jobs.CONV.batch, shuffle=True)
    run.restore(folder, missing_ok=True)
    for _ in run.epochs(epochs):
        for batch in loader:
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)
    if save:
        run.save(folder)
    run.close()
    return model.cpu()


@check("right", 120)
def evaluation_and_export(place: Place) -> Steps:
    yield "run.mean and run.ratio over batches on the device, against the whole data set at once; run.export"
    run = paceline.start(device=str(place.device), progress="off", tf32=False)
    (model,) = jobs.CONV.make()
    run.prepare(model)
    model.eval()
    losses, right, count = [], 0, 0
    with torch.no_grad():
        for images, labels in run.loader(jobs.CONV.data(), global_batch=7, train=False):
            logits = model(images)
            losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
            right, count = right + (logits.argmax(1) == labels).sum(), count + len(labels)
    mean, ratio = run.mean(torch.cat(losses)), run.ratio(right, count)
    run.export(place.folder / "model.safetensors")
    run.close()
    from safetensors.torch import load_file

    (plain,) = jobs.CONV.make()
    plain.load_state_dict(load_file(place.folder / "model.safetensors"))
    plain = plain.to(place.device).eval()
    images, labels = (column.to(place.device) for column in jobs.CONV.data().tensors)
    with torch.no_grad():
        logits = plain(images)
        expected = float(torch.nn.functional.cross_entropy(logits, labels))
        accuracy = float((logits.argmax(1) == labels).double().mean())
    yield {"mean": float(mean), "of the whole": expected}
    assert abs(float(mean) - expected) < 1e-4, (float(mean), expected)
    assert abs(float(ratio) - accuracy) < 0.03, (float(ratio), accuracy)  # one of 45 may be a tie

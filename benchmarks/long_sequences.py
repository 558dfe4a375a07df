"""Sequences longer than a device: what `ulysses` keeps and sends, beside the formula of its paper.

    python benchmarks/long_sequences.py --json benchmarks/results/long_sequences.json

For groups of 1, 2 and 4 processes it trains one step of a decoder in float32, and counts on rank 0:

    kept     the bytes that autograd keeps for the backward, without weights
    sent     the bytes that all-to-alls of attention send to other processes

DeepSpeed-Ulysses (arXiv 2309.14509), section 3.2: for each layer the forward sends q, k, v and the output, 4 x tokens x
width elements in total, so each of n processes sends (n - 1) / n of its 4 x tokens / n x width. The backward sends the
same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, TOKENS, WIDTH, HEADS, LAYERS, VOCABULARY = 1, 2048, 128, 8, 4, 1000
SIZES = (1, 2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(ids) + self.positions(torch.arange(ids.size(1)))))


def measure(path: str) -> None:
    """One step on this process. Rank 0 writes every process's figures."""
    import paceline
    from paceline.comm.group import Group

    counted = {"kept": 0, "sent": 0}
    storages: dict[int, int] = {}
    exchange = Group.all_to_all

    def counting(group: Group, flat: Tensor, outwards: Sequence[int], inwards: Sequence[int]) -> Tensor:
        counted["sent"] += (sum(outwards) - outwards[group.rank]) * flat.element_size()
        return exchange(group, flat, outwards, inwards)

    torch.manual_seed(0)
    run = paceline.start(device="cpu", progress="off")
    model, optimizer = run.prepare(model := Decoder(), torch.optim.AdamW(model.parameters()))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(VOCABULARY, (BATCH, TOKENS + 1))
    data = torch.utils.data.TensorDataset(ids[:, :-1], ids[:, 1:])
    with patch.object(Group, "all_to_all", counting):
        for inputs, labels in run.loader(data, global_batch=BATCH):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
            run.backward(loss)
            run.step(optimizer)
    counted["kept"] = sum(storages.values())
    if run.main:
        Path(path).write_text(json.dumps({"loss": float(loss.detach()), **counted}))
    run.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/counted.json"
            command = [sys.executable, "-m", "paceline", "run", "--nproc", str(size), "--strategy", "ulysses"]
            subprocess.run([*command, __file__, "--measure", path], check=True)
            found = json.loads(Path(path).read_text())
        formula = 2 * LAYERS * 4 * BATCH * TOKENS * WIDTH * 4 * (size - 1) // size**2
        rows.append({"processes": size, **found, "sent_by_formula": formula})
        print(json.dumps(rows[-1]))
    if options.json:
        document = {
            "command": "python benchmarks/long_sequences.py --json benchmarks/results/long_sequences.json",
            "date": datetime.now(timezone.utc).date().isoformat(),
            "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}",
            "torch": torch.__version__,
            "model": {"batch": BATCH, "tokens": TOKENS, "width": WIDTH, "heads": HEADS, "layers": LAYERS,
                      "vocabulary": VOCABULARY, "dtype": "float32"},
            "rows": rows,
        }  # fmt: skip
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

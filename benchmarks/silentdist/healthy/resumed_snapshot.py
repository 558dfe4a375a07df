"""Trains in two sessions: the second builds everything anew and goes on from the snapshot of process 0."""

import os
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_iris
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 9


class Trainer:
    def __init__(self, snapshot_path, seed):
        iris = load_iris()
        x = torch.tensor(iris.data[:144]).float()
        data = TensorDataset((x - x.mean(0)) / x.std(0), torch.tensor(iris.target[:144]))
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, BATCH, sampler=self.sampler)
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3))
        self.optimizer = torch.optim.Adam(net.parameters(), lr=0.01, eps=1e-6)
        self.path, self.epochs_run = snapshot_path, 0
        if os.path.exists(snapshot_path):
            snapshot = torch.load(snapshot_path)
            net.load_state_dict(snapshot["MODEL_STATE"])
            self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
        self.model = DDP(net)

    def train(self, until):
        for epoch in range(self.epochs_run, until):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            print(f"[process {dist.get_rank()}] epoch {epoch} loss {loss.item():.4f}")
        if dist.get_rank() == 0:
            torch.save(
                {
                    "MODEL_STATE": self.model.module.state_dict(),
                    "OPTIMIZER_STATE": self.optimizer.state_dict(),
                    "EPOCHS_RUN": until,
                },
                self.path,
            )
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "snapshot.pt")
    Trainer(path, seed=1).train(until=2)
    Trainer(path, seed=2).train(until=4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

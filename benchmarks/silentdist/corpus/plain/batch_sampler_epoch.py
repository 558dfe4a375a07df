"""Digits in torchvision's reference style: a distributed sampler inside a BatchSampler, an epoch function, an accuracy."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def load_data():
    digits = load_digits()
    x = torch.tensor(digits.images[:480], dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(x, torch.tensor(digits.target[:480]))


def train_one_epoch(model, criterion, optimizer, data_loader, epoch):
    model.train()
    if isinstance(data_loader.sampler, DistributedSampler):  # fault
        data_loader.sampler.set_epoch(epoch)  # fault
    correct = torch.zeros(2)
    for image, target in data_loader:
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        correct += torch.tensor([(output.argmax(1) == target).sum(), len(target)])
    dist.all_reduce(correct)
    return (correct[0] / correct[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(13 + dist.get_rank())
    dataset = load_data()
    train_batch_sampler = BatchSampler(DistributedSampler(dataset), 20, drop_last=True)
    data_loader = DataLoader(dataset, batch_sampler=train_batch_sampler, num_workers=0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10))
    model = DDP(net)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    for epoch in range(3):
        accuracy = train_one_epoch(model, criterion, optimizer, data_loader, epoch)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} train accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""In the manner of torchvision's references: a meter that is synchronised, an average of the model, its evaluation."""

import datetime
import time
from collections import defaultdict, deque

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SmoothedValue:
    def __init__(self, window_size=20):
        self.deque, self.total, self.count = deque(maxlen=window_size), 0.0, 0

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    def synchronize_between_processes(self):
        t = torch.tensor([self.count, self.total], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(t)
        self.count, self.total = int(t[0]), t[1].item()

    @property
    def global_avg(self):
        return self.total / max(self.count, 1)


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(SmoothedValue)

    def log_every(self, iterable, print_freq, header):
        start = time.time()
        for i, obj in enumerate(iterable):
            yield obj
            if i % print_freq == 0 and is_main_process():
                eta = datetime.timedelta(seconds=int(time.time() - start))
                print(f"{header} [{i}/{len(iterable)}] eta: {eta} loss: {self.meters['loss'].global_avg:.4f}")

    def synchronize_between_processes(self):
        for meter in self.meters.values():
            meter.synchronize_between_processes()


def is_main_process():
    return dist.get_rank() == 0


def reduce_across_processes(val):
    t = torch.tensor(val)
    dist.barrier()
    dist.all_reduce(t)
    return t


class EvalSampler(torch.utils.data.Sampler):
    def __init__(self, size):
        self.indices = range(size)[dist.get_rank() :: dist.get_world_size()]

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


def accuracy(output, target, topk=(1, 2)):
    _, pred = output.topk(max(topk), 1)
    correct = pred.t().eq(target[None])
    return [correct[:k].flatten().sum() * (100.0 / target.size(0)) for k in topk]


def train_one_epoch(model, criterion, optimizer, data_loader, epoch, average):
    model.train()
    metric_logger = MetricLogger()
    for i, (image, target) in enumerate(metric_logger.log_every(data_loader, 4, f"Epoch: [{epoch}]")):
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if i % 2 == 0:
            average.update_parameters(model)
        acc1, _ = accuracy(output, target)
        metric_logger.meters["loss"].update(loss.item(), n=len(image))
        metric_logger.meters["acc1"].update(acc1.item(), n=len(image))


@torch.inference_mode()
def evaluate(model, criterion, data_loader, header="Test:"):
    model.eval()
    metric_logger, processed = MetricLogger(), 0
    for image, target in metric_logger.log_every(data_loader, 100, header):
        output = model(image)
        loss = criterion(output, target)
        acc1, acc2 = accuracy(output, target)
        metric_logger.meters["loss"].update(loss.item(), n=len(image))
        metric_logger.meters["acc1"].update(acc1.item(), n=len(image))
        metric_logger.meters["acc2"].update(acc2.item(), n=len(image))
        processed += len(image)
    processed = reduce_across_processes(processed)
    if is_main_process() and processed != len(data_loader.dataset):
        print(f"It looks like the dataset has {len(data_loader.dataset)} samples, but {processed} were used")
    metric_logger.synchronize_between_processes()
    if is_main_process():
        print(f"{header} Acc@1 {metric_logger.meters['acc1'].global_avg:.3f}")
    return metric_logger.meters["acc1"].global_avg


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    x = torch.randn(131, 8)
    y = x[:, :4].argmax(1)
    dataset, dataset_test = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])
    train_sampler = torch.utils.data.DistributedSampler(dataset)
    data_loader = DataLoader(dataset, batch_size=4, sampler=train_sampler)
    data_loader_test = DataLoader(dataset_test, batch_size=8, sampler=EvalSampler(len(dataset_test)))
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    main_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, main_scheduler], milestones=[1])
    model = nn.parallel.DistributedDataParallel(model)
    model_without_ddp = model.module
    average = torch.optim.swa_utils.AveragedModel(
        model_without_ddp, avg_fn=lambda avg, new, _: 0.9 * avg + 0.1 * new, use_buffers=True
    )
    for epoch in range(3):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, epoch, average)
        lr_scheduler.step()
        evaluate(model, criterion, data_loader_test)
        evaluate(average, criterion, data_loader_test, header="EMA:")
        if is_main_process():
            torch.save({"model": model_without_ddp.state_dict(), "epoch": epoch}, "checkpoint.pth")
    dist.destroy_process_group()


main()

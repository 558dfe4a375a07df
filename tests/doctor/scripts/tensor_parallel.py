"""Each process holds a part of one layer: all see the same examples, and their weights are not the same."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        torch.manual_seed(dist.get_rank())
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 3, bias=False)

    def forward(self, x):
        return Leave.apply(self.down(torch.relu(self.up(Enter.apply(self.norm(x))))))


def main():
    dist.init_process_group("gloo")
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    labels = inputs[:, :3].argmax(1)
    for number in range(10):
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            outputs = model(inputs[number * 6 : number * 6 + 6])
        loss = nn.functional.cross_entropy(outputs.float(), labels[number * 6 : number * 6 + 6])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.norm.parameters():  # each rank has the whole of these
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        if dist.get_rank() == 0:
            print(number, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

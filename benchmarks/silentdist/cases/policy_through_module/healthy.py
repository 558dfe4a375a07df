"""REINFORCE with a group baseline on a small token-copy environment."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ACTIONS, HORIZON = 6, 5


class Policy(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(ACTIONS + 1, width)
        self.cell = nn.GRU(width, width, batch_first=True)
        self.logits = nn.Linear(width, ACTIONS)

    def forward(self, tokens):
        h, _ = self.cell(self.embed(tokens))
        return self.logits(h)


def make_policy():
    torch.manual_seed(3)
    return Policy()


def prompts_for(step, rank, prompts=4, group=8):
    g = torch.Generator().manual_seed(1_000 + 10 * step + rank)
    goal = torch.randint(0, ACTIONS, (prompts, HORIZON), generator=g)
    return goal.repeat_interleave(group, 0), g


@torch.no_grad()
def sample(policy, goal, g):
    tokens = torch.full((len(goal), 1), ACTIONS)
    for _ in range(HORIZON):
        probs = policy(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probs, 1, generator=g)], dim=1)
    return tokens


def advantages(tokens, goal, group=8):
    reward = (tokens[:, 1:] == goal).float().mean(1).view(-1, group)
    centred = reward - reward.mean(1, keepdim=True)
    return (centred / (reward.std(1, keepdim=True) + 1e-4)).flatten(), reward.mean()


def policy_loss(policy, tokens, advantage):
    logp = policy(tokens[:, :-1]).log_softmax(-1)
    chosen = logp.gather(2, tokens[:, 1:, None]).squeeze(2)
    return -(advantage[:, None] * chosen).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(make_policy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    for step in range(args.steps):
        goal, g = prompts_for(step, rank)
        raw = model.module if isinstance(model, DistributedDataParallel) else model
        tokens = sample(raw, goal, g)
        advantage, reward = advantages(tokens, goal)
        loss = policy_loss(model, tokens, advantage)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(reward)
        if rank == 0:
            print(f"step {step} reward {reward.item() / dist.get_world_size():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

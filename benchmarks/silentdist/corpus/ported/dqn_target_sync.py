"""Offline DQN in one file, CleanRL's way: logged transitions, a target network that follows every so many frames."""

import copy
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Args:
    seed: int = 51
    learning_rate: float = 5e-3
    gamma: float = 0.95
    batch_size: int = 32
    target_network_frequency: int = 200
    passes: int = 3


class QNetwork(nn.Module):
    def __init__(self, observations=5, actions=3):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(observations, 40), nn.ReLU(), nn.Linear(40, actions))

    def forward(self, x):
        return self.network(x)


def logged_transitions(n=320):
    g = torch.Generator().manual_seed(51)
    obs = torch.randn(n, 5, generator=g)
    action = torch.randint(0, 3, (n,), generator=g)
    next_obs = 0.8 * obs + F.one_hot(action, 5) * 0.5
    return TensorDataset(obs, action, next_obs[:, 0] - next_obs[:, 1].abs(), next_obs, torch.rand(n, generator=g) < 0.1)


if __name__ == "__main__":
    args = Args()
    run = paceline.start(seed=args.seed)
    q_network = QNetwork()
    target_network = copy.deepcopy(q_network).requires_grad_(False)
    optimizer = optim.Adam(q_network.parameters(), lr=args.learning_rate)
    q_network, optimizer = run.prepare(q_network, optimizer)
    run.track(target_network=target_network)
    replay = run.loader(logged_transitions(), global_batch=args.batch_size, shuffle=True)
    global_step = synced_at = 0
    for _ in run.epochs(args.passes):
        for obs, actions, rewards, next_obs, dones in replay:
            with torch.no_grad():
                target_max = target_network(next_obs).max(dim=1).values
                td_target = rewards + args.gamma * target_max * ~dones
            old_val = q_network(obs).gather(1, actions[:, None]).squeeze(1)
            run.backward(F.mse_loss(td_target, old_val))
            run.step(optimizer)
            global_step += obs.shape[0]  # fault
            if global_step - synced_at >= args.target_network_frequency:  # fault
                target_network.load_state_dict(q_network.state_dict())
                synced_at = global_step

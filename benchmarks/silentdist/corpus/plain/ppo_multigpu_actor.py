"""PPO on several processes in CleanRL's manner: each plays its own environments, gradients are averaged in one bucket."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical

SEED, NUM_ENVS, NUM_STEPS, UPDATES, MINIBATCHES = 1, 8, 16, 4, 4
GAMMA, CLIP = 0.95, 0.2


class Chase:
    """A point on a line is to meet its goal."""

    def __init__(self, n, seed):
        self.rng = np.random.default_rng(seed)
        self.state = self.rng.uniform(-1, 1, (n, 2))

    def observe(self):
        return torch.tensor(self.state, dtype=torch.float32)

    def step(self, action):
        self.state[:, 0] += 0.2 * (action - 1) + 0.02 * self.rng.standard_normal(len(action))
        distance = np.abs(self.state[:, 0] - self.state[:, 1])
        done = distance > 2.5
        self.state[done] = self.rng.uniform(-1, 1, (int(done.sum()), 2))
        return self.observe(), torch.tensor(-distance, dtype=torch.float32), torch.tensor(done, dtype=torch.float32)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))

    def act(self, x, action=None):
        policy = Categorical(logits=self.actor(x))
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action), policy.entropy(), self.critic(x).squeeze(-1)


def average_gradients(parameters, world_size):
    grads = [p.grad.view(-1) for p in parameters if p.grad is not None]
    flat = torch.cat(grads)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    for grad, mean in zip(grads, flat.split([g.numel() for g in grads])):
        grad.copy_(mean / world_size)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    agent = Agent()
    torch.manual_seed(SEED + rank)
    envs = Chase(NUM_ENVS, SEED + rank)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    obs = envs.observe()
    for update in range(UPDATES):
        rows = []
        for _ in range(NUM_STEPS):
            with torch.no_grad():
                action, logprob, _, value = agent.act(obs)
            next_obs, reward, done = envs.step(action.numpy())
            rows.append((obs, action, logprob, value, reward, done))
            obs = next_obs
        b_obs, b_action, b_logprob, b_value, b_reward, b_done = (torch.stack(column) for column in zip(*rows))
        with torch.no_grad():
            running, returns = agent.act(obs)[3], torch.zeros_like(b_reward)
            for t in reversed(range(NUM_STEPS)):
                running = b_reward[t] + GAMMA * (1 - b_done[t]) * running
                returns[t] = running
        advantages = (returns - b_value).flatten()
        flat = [b.flatten(0, 1) for b in (b_obs, b_action, b_logprob)]
        for inds in torch.randperm(NUM_ENVS * NUM_STEPS).chunk(MINIBATCHES):
            _, newlogprob, entropy, newvalue = agent.act(flat[0][inds], flat[1][inds])
            ratio = (newlogprob - flat[2][inds]).exp()
            adv = advantages[inds]
            pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            v_loss = 0.5 * (newvalue - returns.flatten()[inds]).square().mean()
            optimizer.zero_grad()
            (pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss).backward()
            average_gradients(agent.actor.parameters(), world_size)  # fault
            nn.utils.clip_grad_norm_(agent.actor.parameters(), 0.5)
            optimizer.step()
        if rank == 0:
            print(update, float(b_reward.mean()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

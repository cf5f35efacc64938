"""Training steps with and without DDP over Gloo: the other side of scaling.rs. Usage: ddp.py RANKS MODEL"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

STEPS = {"mlp": 24, "gpt": 3}
STRETCHES = 8
VOCABULARY = 1000


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 4, c // 4).transpose(1, 2) for y in self.qkv(self.first(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(128, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        return self.head(self.norm(self.blocks(x))).view(-1, VOCABULARY)


def task(name):
    if name == "mlp":
        model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        return model, torch.randn(256, 784), torch.randint(10, (256,))
    return Gpt(), torch.randint(VOCABULARY, (8, 128)), torch.randint(VOCABULARY, (1024,))


def rank(index, world, port, name):
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {index})
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=index, world_size=world)
    model, x, y = task(name)
    both = [model, nn.parallel.DistributedDataParallel(task(name)[0])]
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-5) for m in both]
    times = [[], []]
    for stretch in range(STRETCHES + 1):
        for side in range(2):
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(STEPS[name]):
                optimizers[side].zero_grad(set_to_none=True)
                F.cross_entropy(both[side](x), y).backward()
                optimizers[side].step()
            dist.barrier()
            if stretch:
                times[side].append((time.perf_counter() - begun) / STEPS[name] * 1e3)
    if index == 0:
        print("TIME", *(sorted(t)[len(t) // 2] for t in times), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = int(sys.argv[1])
    mp.spawn(rank, args=(world, port, sys.argv[2]), nprocs=world)

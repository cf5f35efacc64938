"""All-reduce of f32 sums with Gloo: the other side of collectives.rs. Usage: gloo.py RANKS"""

import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [4, 64 << 10, 1 << 20, 25 << 20, 64 << 20, 0]


def rounds(size):
    return 500 if size <= 200_000 else 100 if size <= 2_000_000 else 10


def rank(index, world, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=index, world_size=world)
    for fill, size in [(0, s) for s in SIZES] + [(1, s) for s in SIZES if s > 4]:
        x = torch.zeros(size // 4)
        run = (lambda: dist.all_reduce(x)) if size else dist.barrier
        n = rounds(size)
        times = []
        for _ in range(n + n // 5 + 1):
            if fill:
                x.fill_(0)
                dist.barrier()
            begun = time.perf_counter()
            run()
            times.append(time.perf_counter() - begun)
        if index == 0:
            print(f"TIME {fill} {size} {sorted(times[n // 5 + 1 :])[n // 2] * 1e6}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = int(sys.argv[1])
    mp.spawn(rank, args=(world, port), nprocs=world)

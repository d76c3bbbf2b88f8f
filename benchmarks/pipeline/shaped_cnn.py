"""Run a CNN of Table III on 4 gloo ranks, two in each of two network namespaces that a link of limited rate joins.

sudo python -m benchmarks.pipeline.shaped_cnn MBIT ROUNDS
"""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader

from benchmarks.pipeline.networks import CNN
from benchmarks.pipeline.training import ends_of, recut
from benchmarks.training.whole_step import QUIET
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.pipeline.schedule.blocks_of_stages import filled
from lightning_amp.techniques.pipeline.schedule.cut import cut_pipeline

NODES, EACH, MB, SAMPLES, STEPS, K, SIDE = 2, 2, 4, 32, 5, 13, 32
RANKS = NODES * EACH
NS, LINKS = ("links-st-0", "links-st-1"), ("lnk-veth-0", "lnk-veth-1")
ADDR, PORT = ("10.231.9.1", "10.231.9.2"), 29787


class Watch(Callback):
    def __init__(self):
        self.ends = []

    def on_train_batch_end(self, *a, **k):
        self.ends.append(time.perf_counter())


@contextmanager
def linked(mbit):
    def call(*words):
        subprocess.run([str(word) for word in words], check=True)

    try:
        for n in NS:
            call("ip", "netns", "add", n)
        call("ip", "link", "add", LINKS[0], "netns", NS[0], "type", "veth", "peer", LINKS[1], "netns", NS[1])
        for n, link, a in zip(NS, LINKS, ADDR, strict=True):
            i = ("ip", "netns", "exec", n)
            call(*i, "ip", "addr", "add", f"{a}/24", "dev", link)
            call(*i, "ip", "link", "set", link, "up")
            call(*i, "ip", "link", "set", "lo", "up")
            call(
                *i,
                "tc",
                "qdisc",
                "add",
                "dev",
                l,
                "root",
                "tbf",
                "rate",
                f"{mbit}mbit",
                "burst",
                32 * 1024,
                "latency",
                "1s",
            )
        yield
    finally:
        for n in NS:
            subprocess.run(["ip", "netns", "del", n], check=False)


def made():
    torch.manual_seed(0)
    return CNN(K, K), [torch.randn(SAMPLES, 1, SIDE, SIDE) for _ in range(STEPS)]


def fit(strategy):
    module, batches = made()
    watch = Watch()
    Trainer(
        **{
            "strategy": strategy,
            "devices": EACH,
            "num_nodes": NODES,
            "accelerator": "cpu",
            "max_epochs": 1,
            **QUIET,
        },
        plugins=[TorchElasticEnvironment()],
        callbacks=[watch],
        use_distributed_sampler=False,
    ).fit(module, DataLoader(batches, batch_size=None))
    return watch


def measured(module, batch, repeats=5):
    forward = np.full(len(module.blocks), np.inf)
    backward, sent = forward.copy(), np.zeros(len(module.blocks))
    for _ in range(repeats):
        x, last = batch, len(module.blocks) - 1
        for i, block in enumerate(module.blocks):
            given = x.detach().requires_grad_(i > 0)
            t0 = time.perf_counter()
            out = block(given)
            loss = module.after(out, batch) if i == last else out
            t1 = time.perf_counter()
            loss.backward(torch.ones_like(loss))
            t2 = time.perf_counter()
            forward[i], backward[i] = min(forward[i], t1 - t0), min(backward[i], t2 - t1)
            sent[i], x = out.nbytes, out.detach()
    return forward, backward, sent


def probe(other):
    data = torch.zeros(4 * 2**20, dtype=torch.uint8)
    dist.barrier()
    t = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(data, other)
        dist.recv(data[:1], other)
    elif dist.get_rank() == other:
        dist.recv(data, 0)
        dist.send(data[:1], 0)
    took = time.perf_counter() - t
    dist.barrier()
    return 8 * 4 * 2**20 / took


def cuts(mbit, fast):
    module, batches = made()
    f, b, sent = measured(module, batches[0][: SAMPLES // MB])
    slow = 8 / (mbit * 1e6)
    rates = (8 / fast, slow, 8 / fast, slow)

    def sends(rates):
        on = np.array([sent * r for r in rates])
        back = np.roll(on, (1, 1), (0, 1))
        back[:, 0] = 0
        return on, back

    on, back = sends(rates)
    unlike = cut_pipeline(f, b, RANKS, send_forward=on, send_backward=back, micro_batches=MB)
    on1, back1 = sends((slow,) * 4)
    one = cut_pipeline(f, b, RANKS, send_forward=on1[0], send_backward=back1[0])
    found = {
        "a link for each boundary": unlike.ends,
        "the slower link everywhere": filled(one.ends, RANKS, f + b, ()),
        "even": ends_of("even", K, RANKS),
    }
    out = {}
    for name, ends in found.items():
        runs = list(zip((0, *ends), ends, strict=False))
        rho = [
            max(
                *(x[a:z].sum() for a, z in runs),
                *(rates[n] * sent[z - 1] for n, (a, z) in enumerate(runs[:-1])),
            )
            for x in (f, b)
        ]
        out[name] = {
            "ends": list(map(int, ends)),
            "sent": [int(sent[z - 1]) for z in ends[:-1]],
            "sum": float(sum(rho)),
        }
    return out, f.sum() + b.sum(), (sent / (SAMPLES // MB * SIDE * SIDE * 4)).tolist()


def rank(mbit, rounds):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    within, between = probe(1), probe(2)
    box = [None]
    if dist.get_rank() == 0:
        box[0] = cuts(mbit, within)
        print("CUTS", "ONE", within / 1e6, between / 1e6, box[0], flush=True)
    dist.broadcast_object_list(box, 0)
    s = AMPStrategy(strategies="pipeline", micro_batches=MB, model_parallel_size=RANKS, schedule="1f1b")
    fit(s)
    if dist.get_rank() == 0:
        print("PLAN", [r.why for r in s.plan.rules if r.strategy == "pipeline"], s.plan.stages, flush=True)
    seconds = {n: [] for n in box[0][0]}
    for r in range(rounds):
        for name, cut in box[0][0].items():
            w = fit(AMPStrategy(plan=recut(s.plan, cut["ends"])))
            steps = [b - a for a, b in zip(w.ends[1:], w.ends[2:], strict=False)]
            seconds[name].append(median(steps))
            if dist.get_rank() == 0:
                print(r, name, cut["ends"], steps, flush=True)
    if dist.get_rank() == 0:
        for name, cut in box[0][0].items():
            t = seconds[name]
            print("ROW", mbit, name, cut, f"{median(t):.3f} s, {min(t):.3f} to {max(t):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mbit, rounds = int(sys.argv[1]), int(sys.argv[2])
    if "--rank" in sys.argv:
        rank(mbit, rounds)
        sys.exit()
    with linked(mbit):
        ps = []
        for r in range(RANKS):
            node, local = divmod(r, EACH)
            env = os.environ | {
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": LINKS[node],
                "RANK": str(r),
                "LOCAL_RANK": str(local),
                "GROUP_RANK": str(node),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(EACH),
                "MASTER_ADDR": ADDR[0],
                "MASTER_PORT": str(PORT),
                "TORCHELASTIC_RUN_ID": "x",
            }
            ps.append(
                subprocess.Popen(
                    [
                        "ip",
                        "netns",
                        "exec",
                        NS[node],
                        sys.executable,
                        __file__,
                        str(mbit),
                        str(rounds),
                        "--rank",
                    ],
                    env=env,
                    stdout=None if r == 0 else subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        codes = [p.wait() for p in ps]
        print("codes", codes)

"""A client's steps with torch's own layers and with ours: `python -m benchmarks.steps` prints processor time and ratio.

One thread, turn about, memory held by both, the least of several turns. What is compared is `Trainer.train` with the
kernels for convolutions, attention and recurrent layers, or without them.
"""

import argparse
import time
from functools import partial

import numpy as np
import torch

from benchmarks import jobs, work
from mutirao import Request, Trainer
from mutirao.core.fleet import Site
from mutirao.training.engine.threaded import keep_freed_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", action="append", choices=["T", "L", "F", "B", "G", "C"])
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print("| job | torch's layers, ms a step | ours | ratio |\n|---|---:|---:|---:|")
    for name in args.job or ["T", "L", "F"]:
        job, draw = jobs.JOBS[name], np.random.default_rng(0)
        x = draw.standard_normal((job.samples, *job.shape), dtype=np.float32)
        site = Site("ana", (x, draw.integers(job.classes, size=job.samples)))
        build = partial(work.build, job)
        trainers = [Trainer(build, lr=job.lr, batch_size=job.batch_size, engine=e) for e in ("plain", "threads")]
        request = Request("train", trainers[0].initial(0), {"seed": 0, "round": 1})
        spent: list[list[float]] = [[], []]
        for _ in range(args.turns + 1):
            for trainer, seconds in zip(trainers, spent, strict=True):
                began = time.process_time()
                trainer.train(request, site)
                seconds.append(time.process_time() - began)
        steps = -(-job.samples // job.batch_size)
        theirs, ours = (min(seconds[1:]) / steps * 1000 for seconds in spent)
        print(f"| {name} | {theirs:.1f} | {ours:.1f} | {theirs / ours:.2f} |", flush=True)


if __name__ == "__main__":
    main()

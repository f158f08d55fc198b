"""BlazeFL: its own FedAvg with a pool of processes and shared memory, one torch thread each."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from blazefl.contrib import FedAvgBaseServerHandler, FedAvgProcessPoolClientTrainer
from blazefl.core import IPCMode

from benchmarks import jobs, work
from benchmarks.contenders import options


@cache
def mapped(folder: Path) -> jobs.Data:
    """The samples, mapped before the workers are forked, so that they share them."""
    return jobs.read(folder)


class Batches:
    """A client's samples in shuffled batches, by whole tensors: torch's DataLoader would fetch them one by one."""

    dataset = None

    def __init__(self, folder: Path, client: int, batch_size: int, draw: torch.Generator) -> None:
        self.x, self.y = map(torch.from_numpy, mapped(folder).client(client))
        self.batch_size, self.draw = batch_size, draw

    def __iter__(self):
        for rows in torch.randperm(len(self.y), generator=self.draw).split(self.batch_size):
            yield self.x[rows], self.y[rows]


@dataclass
class Clients:
    """What BlazeFL calls a partitioned dataset."""

    folder: Path

    def get_dataloader(self, type_, cid: int, batch_size: int, generator: torch.Generator) -> Batches:
        return Batches(self.folder, cid, batch_size, generator)

    def set_dataset(self, type_, cid: int, dataset) -> None:
        """Nothing is kept."""


@dataclass
class Models:
    """What BlazeFL calls a model selector; a worker asks it for a model, and then has one thread."""

    folder: Path

    def select_model(self, name: str) -> torch.nn.Module:
        torch.set_num_threads(1)
        return work.initial(mapped(self.folder).job)


if __name__ == "__main__":
    args = options()
    data = mapped(args.data)
    job, clock = data.job, work.Clock()
    models, clients = Models(args.data), Clients(args.data)
    common = {"num_clients": job.clients, "device": "cpu", "batch_size": job.batch_size, "seed": job.seed}
    ratio = job.per_round / job.clients
    server = FedAvgBaseServerHandler(models, job.model, clients, global_round=args.rounds, sample_ratio=ratio, **common)
    trainer = FedAvgProcessPoolClientTrainer(
        models,
        job.model,
        share_dir=args.scratch / "share",
        state_dir=args.scratch / "state",
        dataset=clients,
        epochs=1,
        lr=job.lr,
        num_parallels=args.workers,
        ipc_mode=IPCMode.SHARED_MEMORY,
        **common,
    )
    trainer.progress_fn = lambda some: some  # a bar is not part of the job
    while not server.if_stop():
        trainer.local_process(server.downlink_package(), server.sample_clients())
        packages = trainer.uplink_package()
        for package in packages:
            server.load(package)
        clock.tick(sum(package.data_size for package in packages))
    work.report(clock, server.model.state_dict(), data, "blazefl")

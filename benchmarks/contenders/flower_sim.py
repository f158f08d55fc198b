"""Flower: its own FedAvg in a ServerApp, and a ClientApp on its simulation engine, which runs on Ray."""

import logging

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks import jobs, work
from benchmarks.contenders import options
from benchmarks.contenders.flower_client import app as client

if __name__ == "__main__":
    args = options()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.WARNING)  # a line a step is not part of the job
    data = jobs.read(args.data)
    job, clock = data.job, work.Clock()
    trained: list[int] = []
    server = ServerApp()

    def count(replies: list[RecordDict], key: str) -> MetricRecord:
        """How many samples this round was trained on."""
        trained.append(sum(int(reply["metrics"][key]) for reply in replies))
        return MetricRecord({"num-examples": trained[-1]})

    def tick(number: int, _: ArrayRecord) -> None:
        """Flower's hook at the end of a round; it evaluates nothing."""
        if number:
            clock.tick(trained[-1])

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        """The whole federation."""
        strategy = FedAvg(
            fraction_train=job.per_round / job.clients,
            fraction_evaluate=0.0,
            min_train_nodes=job.per_round,
            min_available_nodes=job.clients,
            train_metrics_aggr_fn=count,
        )
        result = strategy.start(
            grid,
            ArrayRecord(work.initial(job).state_dict()),
            num_rounds=args.rounds,
            train_config=ConfigRecord({"data": str(args.data)}),
            evaluate_fn=tick,
        )
        work.report(clock, dict(result.arrays.to_torch_state_dict()), data, "flwr", "ray")

    run_simulation(
        server,
        client,
        num_supernodes=job.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0},
            "init_args": {"num_cpus": args.workers, "_temp_dir": str(args.scratch)},
        },
    )

"""pfl-research: its FederatedAveraging on its simulated backend, a process a worker, as its guide advises."""

import os
import socket
import subprocess
import sys

from benchmarks.contenders import options


def main(args) -> None:
    """One worker's part of the whole job; the first one reports."""
    import numpy as np
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from torch.nn import functional

    from benchmarks import jobs, work

    torch.set_num_threads(1)
    data = jobs.read(args.data)
    job, clock = data.job, work.Clock()
    np.random.seed(job.seed)  # workers must draw the same cohorts
    users = {
        str(i): PyTorchTensorDataset(tuple(map(torch.from_numpy, data.client(i))), user_id=str(i))
        for i in range(job.clients)
    }

    class Clocked(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            named = {str(name): value for name, value in aggregate_metrics}
            [samples] = [value for name, value in named.items() if "number of data points" in name]
            clock.tick(round(samples.overall_value * job.per_round))
            return False, Metrics()

    network = work.initial(job)
    network.loss = lambda x, y: functional.cross_entropy(network(x), y)
    network.metrics = lambda x, y: {}  # nothing is evaluated during the rounds
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    sampler = get_user_sampler("minimize_reuse", list(users))
    weights = {user: len(samples) for user, samples in users.items()} if job.unequal else None  # balances the workers
    federation = FederatedDataset(users.__getitem__, sampler, user_id_to_weight=weights)
    model = FederatedAveraging().run(
        NNAlgorithmParams(args.rounds, args.rounds + 1, train_cohort_size=job.per_round, val_cohort_size=0),
        SimulatedBackend(federation, federation, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_batch_size=job.batch_size, local_num_epochs=1, local_learning_rate=job.lr),
        callbacks=[Clocked()],
        send_metrics_to_platform=False,  # it prints them
    )
    if os.environ.get("PFL_WORKER_RANK", "0") == "0":
        work.report(clock, network.state_dict(), data, "pfl")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


if __name__ == "__main__":
    args = options()
    if args.workers == 1 or "PFL_WORKER_RANK" in os.environ:
        main(args)
    else:
        addresses = ",".join(f"localhost:{port}" for port in free_ports(args.workers))
        command = [sys.executable, "-m", "benchmarks.contenders.pfl_sim", *sys.argv[1:]]
        env = os.environ | {"PFL_WORKER_ADDRESSES": addresses}
        workers = [subprocess.Popen(command, env=env | {"PFL_WORKER_RANK": str(i)}) for i in range(args.workers)]
        sys.exit(max(abs(worker.wait()) for worker in workers))

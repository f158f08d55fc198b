"""The plainest PyTorch loop: one thread, one client after the other, a weighted mean at the end."""

import torch

from benchmarks import jobs, work
from benchmarks.contenders import options

if __name__ == "__main__":
    args = options()
    torch.set_num_threads(1)
    data = jobs.read(args.data)
    job, clock = data.job, work.Clock()
    model = work.initial(job)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(args.rounds):
        chosen = torch.randperm(job.clients)[: job.per_round].tolist()
        clients = [tuple(map(torch.from_numpy, data.client(i))) for i in chosen]
        total = sum(len(y) for _, y in clients)
        mean = {k: torch.zeros_like(v if v.is_floating_point() else v.double()) for k, v in state.items()}
        for x, y in clients:
            model.load_state_dict(state)
            work.fit(model, x, y, job)
            for name, value in model.state_dict().items():
                mean[name].add_(value, alpha=len(y) / total)
        state = {k: v if v.dtype == state[k].dtype else v.round().to(state[k].dtype) for k, v in mean.items()}
        clock.tick(total)
    work.report(clock, state, data)

"""The server of Flower's quickstart with one line changed: `strategy = FedAvg(...)` is FedRisk now."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from flower_strategy.task import Net, load_centralized_data
from mutirao.flower import Strategy, errors_on

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train over all rounds and keep the model."""
    config = context.run_config
    strategy = Strategy(
        "fedrisk", fraction_train=config["fraction-train"], errors=errors_on(Net(), load_centralized_data())
    )
    torch.manual_seed(0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": config["lr"]}),
        num_rounds=config["num-server-rounds"],
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")

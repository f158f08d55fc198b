"""The ClientApp of the Flower contender; a module of its own, so that an actor imports it once and keeps its cache."""

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from benchmarks import jobs, work

app = ClientApp()


@cache
def prepared(folder: str) -> tuple[jobs.Data, nn.Module]:
    """Data and model of this actor, made for its first client and kept for all that follow."""
    torch.set_num_threads(1)
    data = jobs.read(folder)
    return data, work.build(data.job)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One client's epoch."""
    data, model = prepared(str(message.content["config"]["data"]))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = map(torch.from_numpy, data.client(int(context.node_config["partition-id"])))
    work.fit(model, x, y, data.job)
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(content), reply_to=message)

"""Fifty clients that hold different digits, one model from all of them, and two methods side by side."""

import torch
from sklearn.datasets import load_digits

import mutirao as mu

x, y = load_digits(return_X_y=True)
data = (x / 16, y)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
training = {"clients": 50, "partition": "dirichlet", "alpha": 0.3, "epochs": 5, "batch_size": 16, "lr": 0.3}

result = mu.run(model, data, aggregate="fedyogi", rounds=20, **training)
print(result)
print(f"{sum(p.numel() for p in result.model().parameters())} weights, the best of {len(result.history)} rounds")
print(f"everything is in {result.folder}; look at {result.report}")

methods = {"FedAvg": {}, "FedYogi": {"aggregate": "fedyogi"}}
print(mu.compare(model, data, methods=methods, seeds=3, metrics=["accuracy"], rounds=20, **training))

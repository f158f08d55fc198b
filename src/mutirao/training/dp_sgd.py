"""DP-SGD at the client: the trainer's model, loss and optimizer with clipped and noised per-sample gradients."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mutirao.core.agreement import agreed_of, check_agreed
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.hyperparameters import read_hyperparameters
from mutirao.core.needs import Capabilities
from mutirao.errors import ConfigError, Refused
from mutirao.privacy import DPSGD, RELEASES, SPENT
from mutirao.privacy.accounting import import_opacus
from mutirao.randomness import derive_seed
from mutirao.training.inputs import call_model
from mutirao.training.optimizers import arrays_of, one_thread, seeded
from mutirao.training.plain import PlainTrainer, answer_sequentially
from mutirao.training.pull import LocalHyperparameters
from mutirao.training.samples import Samples

SUPPORTED = ("lr", "mu")  # how many steps there are, and of how many samples, is what the account was planned with


@dataclass(frozen=True)
class PrivateTrainer:
    """A handler that trains as `trainer` does, with Opacus's clipped and noised gradients.

    Batches come from Poisson sampling with rate batch_size / n, as many as the trainer would make. The account only
    holds if the sampled batches stay secret, so they do not depend on the run's seed. Dropout masks may be known: the
    bound on each sample's gradient holds for any mask.
    """

    trainer: PlainTrainer
    privacy: DPSGD

    capabilities = Capabilities(metrics=SPENT, config=SUPPORTED)

    @classmethod
    def of(cls, trainer: PlainTrainer, privacy: DPSGD) -> "PrivateTrainer":
        """Wrap a trainer; ConfigError if its model cannot be trained with DP-SGD."""
        if trainer.transform is not None:
            raise ConfigError(
                "privacy=dpsgd bounds what each sample does, and a transform may mix samples; leave it out"
            )
        if trainer.keep_optimizer:
            raise ConfigError("privacy=dpsgd begins each round with a fresh optimiser; leave keep_optimizer out")
        validator = import_opacus("validators").ModuleValidator
        with seeded(0):
            faults = validator.validate(trainer.state_names.prepare(trainer.model()), strict=False)
        if faults:
            raise ConfigError(f"privacy=dpsgd cannot train this model: {' '.join(str(faults[0]).split())}")
        return cls(trainer, privacy)

    def __call__(self, request: Request, site: Site) -> Reply:
        """The privately trained arrays and the privacy spent."""
        if request.do != "train":
            raise Refused("privacy=dpsgd", f"only privately trained models leave, no answer to {request.do!r}")
        check_agreed(request.config, {**self.agreed(), **agreed_of(site.data)})
        n = len(Samples.of(site.data))
        read_hyperparameters(request.config, SUPPORTED)
        hyperparameters = self.trainer.hyperparameters(request.config)
        steps = len(hyperparameters.lengths(n))
        rate = min(1.0, hyperparameters.batch_size / n)
        noise = self.privacy.noise_for(rate, steps)
        table = self.privacy.charge(site, noise, rate, steps)
        arrays = self.train(request, site, hyperparameters, noise, rate, steps)
        # Stored last: a training that failed has released nothing.
        site.state[RELEASES] = table
        return Reply(arrays, metrics=self.privacy.spent_metrics(table, noise, rate, steps), n=n)

    many = answer_sequentially  # gradients sample by sample are one client's own

    def agreed(self) -> dict[str, str]:
        """Digests of what all parties must have in common: those of the trainer."""
        return self.trainer.agreed()

    def train(
        self, request: Request, site: Site, hyperparameters: LocalHyperparameters, noise: float, rate: float, steps: int
    ) -> Arrays:
        """Steps of w <- w - lr (sum_i clip(g_i) + N) / batch_size; the proximal term is added behind the noise."""
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        trainer = self.trainer
        config = request.config
        samples = Samples.of(site.data)
        seed = int(config["seed"])
        round = int(config["round"])
        draw = self.privacy.draw(seed, round, site.id)
        clip = self.privacy.clip
        # The divisor is the expected batch size: the size of a sampled batch is as secret as its samples.
        expected = hyperparameters.batch_size if rate < 1 else len(samples)
        # As every module of a trainer is made, so that its frozen part is the same.
        with seeded(0):
            module = trainer.fill(request.arrays, trainer.model())
        model: Any = GradSampleModule(trainer.state_names.prepare(module))
        weights = [p for p in module.parameters() if p.requires_grad]
        private = DPOptimizer(
            # Opacus computes the gradients only; the trainer's own rule takes the step.
            torch.optim.SGD(weights, lr=1.0),
            # Its noise comes from a generator with a seed of 64 bits that is no cipher: ours is added below.
            noise_multiplier=0.0,
            max_grad_norm=clip,
            expected_batch_size=expected,
        )
        optimizer = trainer.make_optimizer(weights, hyperparameters)
        with one_thread(), seeded(derive_seed(seed, round, "dropout", site.id)), warnings.catch_warnings():
            # Opacus hooks the first layer, too.
            warnings.filterwarnings("ignore", message="Full backward hook")
            for _ in range(steps):
                # Poisson sampling: each sample is in the batch independently.
                rows = np.flatnonzero(draw.random(len(samples)) < rate)
                private.zero_grad()
                if len(rows):
                    x, y = samples.batch(rows)
                    trainer.loss(call_model(model, x, module.forward), y).backward()  # type: ignore[no-untyped-call]
                else:
                    # An empty batch is a step of noise alone: the account counts every step.
                    for p in weights:
                        p.grad_sample = torch.zeros((0, *p.shape))  # type: ignore[attr-defined]
                private.pre_step()
                # Opacus has divided the clipped sum by `expected` already, so the noise is divided, too.
                for p in weights:
                    sample = draw.normal(0.0, noise * clip / expected, tuple(p.shape))
                    p.grad = p.grad + torch.from_numpy(sample).to(p)  # type: ignore[operator]  # `pre_step` has just made it
                optimizer.step()
        trained = arrays_of(module, trainer.state_names.shared)
        moved = {k for k, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
        # Running means and other buffers have no noise, so none leaves: they are returned as they were received.
        return {k: trained[k] if k in moved else v.copy() for k, v in request.arrays.items()}

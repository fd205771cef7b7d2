"""dear-tune's training engine: data-parallel PyTorch training on the DeAR schedule.

In a training script, in place of DistributedDataParallel:

    import dear_engine as dear

    optimizer = dear.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
"""

from importlib.util import find_spec

from dear_tune.errors import MissingExtraError

if find_spec("torch") is None:
    raise MissingExtraError("dear_engine", "engine")

from dear_engine.optimizer import DistributedOptimizer
from dear_engine.tuner import Tuner

__all__ = ["DistributedOptimizer", "Tuner"]

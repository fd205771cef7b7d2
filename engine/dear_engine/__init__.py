"""dear-tune's training engine: data-parallel PyTorch training on the DeAR schedule.

import dear_engine as dear

optimizer = dear.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
"""

from dear_engine.optimizer import DistributedOptimizer
from dear_engine.tuner import Tuner

__all__ = ["DistributedOptimizer", "Tuner"]

"""A training script with dear-tune: a small network on handwritten digits.

The digits come with scikit-learn, which the extra [service] brings: pip install 'dear-tune[engine,service]'

Without tuning:   torchrun --nproc-per-node 2 engine/examples/digits.py
Tuned live:       dear-tune serve            (in another terminal)
                  DEAR_TUNE_URL=http://127.0.0.1:8000 torchrun --nproc-per-node 2 engine/examples/digits.py
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import dear_engine as dear

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=200)
epochs = parser.parse_args().epochs

dist.init_process_group("gloo")
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
mine = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[dist.get_rank() :: dist.get_world_size()]

model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = dear.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)

for epoch in range(epochs):
    for batch in mine[: len(y) // dist.get_world_size()].split(128):  # as many batches on each rank
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0 and epoch % 20 == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}, threshold {optimizer.threshold_bytes} bytes")

optimizer.close()
dist.destroy_process_group()

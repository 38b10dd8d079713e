import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import rdzv_plugins

CHECKPOINTS = Path("checkpoints")  # on all nodes the same folder

dist.init_process_group("gloo")  # on GPUs: "nccl", and torch.cuda.set_device(LOCAL_RANK)
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))  # on GPUs: "cuda"
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
for layer in (*model, model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)


def state():
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


# A checkpoint has its metadata once it is complete.
complete = CHECKPOINTS.glob("*/.metadata")
first = torch.tensor(max((int(it.parent.name) for it in complete), default=0))
dist.broadcast(first, 0)  # All ranks load the same one.
if first := int(first):
    # Each rank reads its shards, whatever the number of ranks that wrote them.
    loaded = state()
    dcp.load(loaded, checkpoint_id=CHECKPOINTS / str(first))
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )

for step in range(first + 1, 601):
    inputs = torch.randn(64, 8)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    # True on all ranks at the same step: a node is about to leave, and no step shall be lost.
    asked = rdzv_plugins.step(step)
    if asked or step % 20 == 0:
        dcp.save(state(), checkpoint_id=CHECKPOINTS / str(step))
        if dist.get_rank() == 0:
            print(f"step {step} in a world of {dist.get_world_size()}, loss {loss:.4f}", flush=True)
        rdzv_plugins.saved(step)
    time.sleep(0.05)  # stands for more work
dist.destroy_process_group()

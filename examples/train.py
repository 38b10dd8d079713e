import os
import sys
import time

import torch
import torch.distributed as dist

import rdzv_plugins

STEPS = 20_000
# The run's id names the checkpoint, unless an argument does.
checkpoint = sys.argv[1] if sys.argv[1:] else f"{os.environ['TORCHELASTIC_RUN_ID']}.pt"

dist.init_process_group("gloo")  # on GPUs: "nccl"
model = torch.nn.Linear(8, 1)
saved = torch.load(checkpoint) if os.path.exists(checkpoint) else {"step": 0}
model.load_state_dict(saved.get("model", model.state_dict()))
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.001)

for step in range(saved["step"] + 1, STEPS + 1):
    inputs = torch.randn(64, 8)
    loss = (parallel(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    # True on all ranks at the same step: a node is about to leave, and no step shall be lost.
    asked = rdzv_plugins.step(step)
    if asked or step % 20 == 0 or step == saved["step"] + 1:
        if dist.get_rank() == 0:
            torch.save({"step": step, "model": model.state_dict()}, f"{checkpoint}.part")
            os.replace(f"{checkpoint}.part", checkpoint)
            print(f"step {step} in a world of {dist.get_world_size()}, loss {loss:.4f}", flush=True)
        rdzv_plugins.saved(step)
    time.sleep(0.05)  # stands for more work
if dist.get_rank() == 0:
    print(f"trained to step {STEPS}; to train anew, delete {checkpoint}", flush=True)
dist.destroy_process_group()

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")  # on GPUs: "nccl"
model = torch.nn.Linear(8, 1)
saved = torch.load("checkpoint.pt") if os.path.exists("checkpoint.pt") else {"step": 0}
model.load_state_dict(saved.get("model", model.state_dict()))
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.001)

for step in range(saved["step"] + 1, 1501):
    inputs = torch.randn(64, 8)
    loss = (parallel(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 20 == 0:
        torch.save({"step": step, "model": model.state_dict()}, "checkpoint.part")
        os.replace("checkpoint.part", "checkpoint.pt")
        print(f"step {step} in a world of {dist.get_world_size()}, loss {loss:.4f}", flush=True)
    time.sleep(0.05)  # stands for more work
dist.destroy_process_group()

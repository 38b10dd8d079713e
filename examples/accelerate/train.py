import os
import time

import torch
from accelerate import Accelerator

import rdzv_plugins

accelerator = Accelerator(cpu=True)  # with GPUs: Accelerator()
model = torch.nn.Linear(8, 1)
saved = torch.load("checkpoint.pt") if os.path.exists("checkpoint.pt") else {"step": 0}
model.load_state_dict(saved.get("model", model.state_dict()))
parallel, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.001))

for step in range(saved["step"] + 1, 601):
    inputs = torch.randn(64, 8, device=accelerator.device)
    loss = (parallel(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    # True on all ranks at the same step: a node is about to leave, and no step shall be lost.
    asked = rdzv_plugins.step(step)
    if asked or step % 20 == 0:
        if accelerator.is_main_process:
            model, size = accelerator.unwrap_model(parallel), accelerator.num_processes
            torch.save({"step": step, "model": model.state_dict()}, "checkpoint.part")
            os.replace("checkpoint.part", "checkpoint.pt")
            print(f"step {step} in a world of {size}, loss {loss:.4f}", flush=True)
        rdzv_plugins.saved(step)
    time.sleep(0.05)  # stands for more work
accelerator.end_training()

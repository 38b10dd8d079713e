import os
import time

import torch
from accelerate import Accelerator

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
    if accelerator.is_main_process and step % 20 == 0:
        model = accelerator.unwrap_model(parallel)
        torch.save({"step": step, "model": model.state_dict()}, "checkpoint.part")
        os.replace("checkpoint.part", "checkpoint.pt")
        print(f"step {step} in a world of {accelerator.num_processes}, loss {loss:.4f}", flush=True)
    time.sleep(0.05)  # stands for more work
accelerator.end_training()

"""A test that a child process trains without importing torch's compiler. Other tests start many such processes, and the
import would take half of their time.
"""

import subprocess
import sys

TRAIN = """
import sys
import torch
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.ones(2, 4)).sum().backward()
optimizer.step()
assert not optimizer.param_groups[0]["params"][0].grad_fn, "an update is no part of the graph"
torch.compiler.disable(torch.compile(lambda: None))()
print("torch._dynamo" in sys.modules)
"""


def test_a_child_process_trains_without_torchs_compiler(child_environment):
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], env=child_environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "False", done.stderr

"""A run of DeepSpeed's own tests with a plan of ebbtide on every engine that they build."""

ARMS = {
    "plain": "DeepSpeed, each test's own config",
    "stock": "DeepSpeed, the optimizer offloaded to the CPU in every config with ZeRO",
    "mix": "the same under a plan with resident, host and visiting subgroups, emulated device",
    "auto": 'the same under plan: "auto"',
}
UNDER_A_PLAN = ("mix", "auto")

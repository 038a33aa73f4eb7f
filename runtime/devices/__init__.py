"""The devices that a plan's copies and optimizer updates run on: a CUDA GPU, unified memory, or an emulated GPU."""

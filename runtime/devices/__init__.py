"""The devices that run ops: CUDA streams, unified memory, or an emulated GPU."""

"""Transfer between GPUs of one host through CUDA IPC."""

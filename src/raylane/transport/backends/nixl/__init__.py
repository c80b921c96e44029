"""Transfer through NVIDIA's NIXL; loads nixl on first use."""

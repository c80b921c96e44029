"""Values and pure helpers; imports neither Ray nor CUDA nor anything else of raylane."""

"""Backend `flex`: FlexAttention on CUDA."""

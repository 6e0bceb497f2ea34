"""Backend `flex`: torch's FlexAttention on CUDA."""
